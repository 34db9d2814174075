"""LFM2, dense and with experts."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import check_kinds, of_each_layer
from engine.models.specs.conv import read_conv
from engine.models.specs.dense import DenseSpec, HeadNorm, NormNames
from engine.models.specs.experts import ExpertNames, ExpertSpec, num_experts_of, number_of

DENSE_NAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
    (r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
    (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
)
WRITTEN_NAMES = (
    (r"\.feed_forward\.gate_proj$", ".feed_forward.w1"),
    (r"\.feed_forward\.up_proj$", ".feed_forward.w3"),
    (r"\.feed_forward\.down_proj$", ".feed_forward.w2"),
    (r"\.self_attn\.o_proj$", ".self_attn.out_proj"),
)
_ATTENTION_NAMES = (
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
)
_EXPERTS = ExpertNames(
    block="feed_forward", gate="w1", up="w3", down="w2", choice_bias="expert_bias"
)


class Lfm2Spec(DenseSpec, frozen=True, kw_only=True):
    """LFM2: layers with a gated short convolution, and few with attention that norms its heads."""

    default_head_norm: ClassVar[HeadNorm] = "each"
    default_eps: ClassVar[float] = 1e-5
    default_tied: ClassVar[bool] = True
    default_theta: ClassVar[float] = 1_000_000.0
    mlp_module: ClassVar[str] = "feed_forward"
    norms: ClassVar[NormNames] = NormNames(before_attention="operator_norm", before_mlp="ffn_norm")
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (*DENSE_NAMES, *_ATTENTION_NAMES)
    written_names: ClassVar[tuple[tuple[str, str], ...]] = WRITTEN_NAMES

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        tied = file.tie_word_embeddings if file.tie_embedding is None else file.tie_embedding
        return msgspec.structs.replace(
            file,
            rms_norm_eps=file.norm_eps,
            tie_word_embeddings=tied,
            units=cls.units(file),
        )

    @classmethod
    def units(cls, file: ConfigFile) -> int:
        """Returns the units of a feed-forward block, which config.json says before a third of them
        is taken away, and the rest is rounded up."""
        units = file.block_ff_dim or file.intermediate_size
        if not file.block_auto_adjust_ff_dim:
            return units
        units = int(2 * units / 3)
        if file.block_ffn_dim_multiplier is None:
            return units
        units = int(file.block_ffn_dim_multiplier * units)
        return -(-units // file.block_multiple_of) * file.block_multiple_of

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        check_kinds(file.layer_types, {"conv", "full_attention"})
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        attends = file.full_attn_idxs or ()
        kinds = of_each_layer(file, "layer_types") or [
            "full_attention" if i in attends else "conv" for i in range(file.num_hidden_layers)
        ]
        return {"conv": read_conv(file, kinds)}


class Lfm2MoeSpec(Lfm2Spec, frozen=True, kw_only=True):
    """LFM2 with experts, chosen by sigmoid scores and a bias, behind a few dense layers."""

    @classmethod
    def units(cls, file: ConfigFile) -> int:
        return file.intermediate_size

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        num_dense = 2 if file.num_dense_layers is None else file.num_dense_layers
        return {
            **super().read_more(file, max_model_len),
            "experts": ExpertSpec(
                count=num_experts_of(file),
                top_k=number_of(file, "num_experts_per_tok"),
                intermediate_size=number_of(file, "moe_intermediate_size"),
                renormalise=file.norm_topk_prob is not False,
                dense_layers=tuple(range(min(num_dense, file.num_hidden_layers))),
                sigmoid=True,
                choice_bias=file.use_expert_bias,
                scaling=1.0 if file.routed_scaling_factor is None else file.routed_scaling_factor,
                names=_EXPERTS,
            ),
        }
