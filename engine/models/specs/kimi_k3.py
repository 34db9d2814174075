"""Kimi K3, text: Kimi Linear whose layers read mixtures of what blocks of them have added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.config import ModelConfig, ParallelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.config.config_parts import LinearAttentionFields
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import Activation
from engine.models.specs.experts import number_of
from engine.models.specs.kimi_linear import KimiLinearSpec
from engine.models.specs.parallel_checks import check_counts

_LATENTS = {"to_latent": "routed_expert_down_proj", "from_latent": "routed_expert_up_proj"}
_NORM = "routed_expert_norm"


class KimiK3Spec(KimiLinearSpec, frozen=True, kw_only=True):
    """Routed experts read latents, gates have soft bounds, so have what they let through; decays
    have a floor, and what a head attends to has a gate for each number.

    Attributes:
        block_size: Layers of a block.
    """

    activation: ClassVar[Activation] = "situ"
    default_scaling: ClassVar[float] = 1.0
    reads_k3: ClassVar[bool] = True
    plain_layers: ClassVar[tuple[str, ...]] = (r"re:.*\.routed_expert_(down|up)_proj$",)

    block_size: int

    @property
    def block_layers(self) -> int:
        return self.block_size

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        more = super().read_more(file, max_model_len)
        said = file.linear_attn_config or LinearAttentionFields()
        size, norm = number_of(file, "routed_expert_hidden_size"), file.latent_moe_use_norm
        names = msgspec.structs.replace(
            more["experts"].names, latent_norm=_NORM if norm else "", **_LATENTS
        )
        experts = msgspec.structs.replace(
            more["experts"],
            names=names,
            latent_size=size,
            soft_bounds=(file.activation_situ_beta, file.activation_situ_linear_beta),
        )
        kda = msgspec.structs.replace(
            more["kda"], is_mixed=True, floor=said.gate_lower_bound or 0.0
        )
        latent = msgspec.structs.replace(more["latent"], gated=True, gates_numbers=True)
        block_size = number_of(file, "attn_res_block_size")
        return {
            **more, "experts": experts, "kda": kda, "latent": latent, "block_size": block_size
        }  # fmt: skip

    def check_parallel(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        super().check_parallel(model, parallel)
        assert self.experts is not None
        if self.experts.names.latent_norm:
            counts = ((self.experts.latent_size, "numbers in latents of experts"),)
            check_counts(model, parallel, counts)

    def _rare_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        return (*super()._rare_facts(model), ("block_size", self.block_size))

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        said = file.linear_attn_config or LinearAttentionFields()
        heads, dim = said.num_heads or 0, said.head_dim or 0
        if heads > dim:
            what = f"{heads} heads, whose decays are stored in the {dim} numbers of a head"
            yield UnsupportedField("linear_attn_config", what)
        if not said.use_full_rank_gate:
            yield UnsupportedField("use_full_rank_gate", "gates that are projected in two steps")
        if (said.gate_lower_bound or -1.0) > 0:
            yield UnsupportedField("gate_lower_bound", f"decays not below {said.gate_lower_bound}")
        if not file.mla_use_output_gate:
            yield UnsupportedField("mla_use_output_gate", "latents without a gate")
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            value = getattr(file, name)
            if not isinstance(value, float) or value <= 0:
                yield UnsupportedField(name, "SiTU without this bound")
