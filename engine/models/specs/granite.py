"""Granite 3 and 4."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, check_kinds
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertNames, ExpertSpec, number_of
from engine.models.specs.mamba import read_mamba
from engine.models.specs.states import LINEAR_KINDS


class GraniteSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama with multipliers of embeddings, of what layers add, of scores and of logits."""

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        added = file.residual_multiplier
        if added <= 0.0 or file.logits_scaling <= 0.0:
            raise UnsupportedField("residual_multiplier", "a multiplier that is not above 0")
        return {
            # (x / r) / rms(x / r) is x / rms(x), if what keeps the root from 0 is divided, too.
            "rms_norm_eps": cls.eps_of(file) / added**2,
            "stream_scale": file.embedding_multiplier / added,
            "attention_scale": file.attention_multiplier or 1.0,
            "logit_scale": 1.0 / file.logits_scaling,
        }


_HYBRID_NAMES = ExpertNames(router="router.weight", shared="shared_mlp")
_KINDS = LINEAR_KINDS | {"attention", "full_attention"}


class GraniteHybridSpec(GraniteSpec, frozen=True, kw_only=True):
    """Granite 4 with layers of Mamba 2, of which few have attention that does not rotate; dense, or
    with experts beside a shared one."""

    fused_gate_up: ClassVar[bool] = True
    mlp_module: ClassVar[str] = "mlp.shared_mlp"
    default_tied: ClassVar[bool] = False
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_mlp.down_proj."),
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".mlp.router."),
        (r"\.block_sparse_moe\.", ".mlp."),
    )

    written_names: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.mlp\.shared_mlp\.(gate_up|gate|up)_proj$", ".shared_mlp.input_linear"),
        (r"\.mlp\.shared_mlp\.down_proj$", ".shared_mlp.output_linear"),
        (r"\.mlp\.experts\.\d+\.(gate|up)_proj$", ".block_sparse_moe.input_linear"),
        (r"\.mlp\.experts\.\d+\.down_proj$", ".block_sparse_moe.output_linear"),
        (r"\.mlp\.(?=experts|router)", ".block_sparse_moe."),
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        shared = number_of(file, "shared_intermediate_size")
        if file.num_local_experts:
            return msgspec.structs.replace(
                file, moe_intermediate_size=file.intermediate_size, units=shared
            )
        return msgspec.structs.replace(file, units=shared)

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        check_kinds(file.layer_types, _KINDS)
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        rotates = file.position_embedding_type == "rope"
        experts = None
        if file.num_local_experts:
            experts = ExpertSpec(
                count=file.num_local_experts,
                top_k=number_of(file, "num_experts_per_tok"),
                intermediate_size=number_of(file, "moe_intermediate_size"),
                renormalise=True,
                shared_size=file.intermediate_size,
                names=_HYBRID_NAMES,
            )
        return {
            **super().read_more(file, max_model_len),
            "mamba": read_mamba(file, cls.eps_of(file)),
            "unrotated_layers": () if rotates else tuple(range(file.num_hidden_layers)),
            "experts": experts,
        }
