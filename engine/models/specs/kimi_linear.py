"""Kimi Linear: three layers of four have Kimi Delta Attention, the others latents that do not
rotate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from engine.config import KVLayers, ModelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.config.config_parts import LinearAttentionFields
from engine.models.specs.base import UnsupportedField, check_kinds
from engine.models.specs.deepseek import DeepseekV3Spec
from engine.models.specs.experts import SHARED_EXPERTS
from engine.models.specs.kimi_delta import KimiDeltaSpec
from engine.models.specs.linear import check_delta
from engine.models.specs.states import MIXED_KINDS, state_layers, state_number

_OF_K3 = (
    "attn_res_block_size", "routed_expert_hidden_size", "latent_moe_use_norm",
    "mla_use_output_gate",
)  # fmt: skip


class KimiLinearSpec(DeepseekV3Spec, frozen=True, kw_only=True):
    """A V3 in other words, most of whose layers keep a state."""

    reads_k3: ClassVar[bool] = False
    default_eps: ClassVar[float] = 1e-5
    num_dense: ClassVar[int | None] = 1
    default_scaling: ClassVar[float] = 2.446
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        # transformers 5.24 writes the dense layer under the name of those with experts, too.
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
    )
    written_names: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.mlp(?=\.|$)", ".block_sparse_moe"),
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        said = file.linear_attn_config or LinearAttentionFields()
        return msgspec.structs.replace(
            file,
            max_position_embeddings=file.model_max_length or file.max_position_embeddings,
            num_experts_per_tok=file.num_experts_per_token or file.num_experts_per_tok,
            norm_topk_prob=file.norm_topk_prob if file.moe_renormalize is None
            else file.moe_renormalize,
            n_group=file.num_expert_group or file.n_group,
            scoring_func=file.moe_router_activation_func or file.scoring_func,
            layer_types=file.layer_types or _kinds(file, said),
            linear_num_key_heads=said.num_heads or file.linear_num_heads,
            linear_key_head_dim=said.head_dim or file.linear_head_dim,
            linear_conv_kernel_dim=said.short_conv_kernel_size or file.linear_conv_kernel_dim,
        )  # fmt: skip

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        check_kinds(file.layer_types, MIXED_KINDS)
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        heads = state_number(file, "linear_num_key_heads")
        dim = state_number(file, "linear_key_head_dim")
        kda = KimiDeltaSpec(
            layers=state_layers(file),
            key_heads=heads,
            value_heads=heads,
            key_dim=dim,
            value_dim=dim,
            kernel=state_number(file, "linear_conv_kernel_dim"),
        )
        check_delta(kda)
        more = super().read_more(file, max_model_len)
        names = msgspec.structs.replace(SHARED_EXPERTS, gate="w1", up="w3", down="w2")
        return {
            **more,
            "experts": msgspec.structs.replace(more["experts"], names=names),
            "kda": kda,
            "unrotated_layers": tuple(range(file.num_hidden_layers)),
        }

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns the layers with latents, and those with a state in groups of as many."""
        assert self.kda is not None
        (latents,) = super().kv_layers(model)
        attending = tuple(filter(self.kda.leaves_attention, latents.layers))
        return self.kda.kv_layers_beside(model, (replace(latents, layers=attending),))

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if file.mla_use_nope is False:
            yield UnsupportedField("mla_use_nope", "latents that rotate")
        for name in () if cls.reads_k3 else _OF_K3:
            if getattr(file, name):
                yield UnsupportedField(name, "what Kimi K3 has besides, under another architecture")


def _kinds(file: ConfigFile, said: LinearAttentionFields) -> list[str] | None:
    """Returns a kind for each layer, which Moonshot counts from 1; None: it says nothing. Raises
    `UnsupportedField`."""
    full, linear = set(said.full_attn_layers or ()), set(said.kda_layers or ())
    layers = range(1, file.num_hidden_layers + 1)
    if not full and not linear:
        return None
    if full & linear or full | linear != set(layers):
        raise UnsupportedField(
            "linear_attn_config", "layers that are of both kinds, or of none, or that are not there"
        )
    return ["full_attention" if one in full else "linear_attention" for one in layers]
