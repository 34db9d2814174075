"""Step 3.5 and 3.7, text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.head_sizes import HeadSizes
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import HeadNorm, OutputGate
from engine.models.specs.experts import number_of, sigmoid_experts
from engine.models.specs.step_fields import FULL, WINDOW, limits_of, with_common_names
from engine.models.specs.windowed import WindowedSpec


class StepSpec(WindowedSpec, frozen=True, kw_only=True):
    """More query heads in layers with a window, each with a gate; layers that see everything rotate
    in part, and more slowly. Norms are stored as their distance from 1. Experts as in GLM-4.5, with
    activations of the last layers that have limits."""

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.moe\.gate\.weight$", ".mlp.gate.weight"),
        (r"\.moe\.router_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.moe\.(gate|up|down)_proj\.", r".mlp.experts.\1_proj."),
        (r"\.share_expert\.", ".mlp.shared_experts."),
    )
    default_eps: ClassVar[float] = 1e-5
    default_head_dim: ClassVar[int | None] = 128
    default_head_norm: ClassVar[HeadNorm] = "each"
    default_output_gate: ClassVar[OutputGate] = "per_head"
    gate_name: ClassVar[str] = "g_proj"
    norm_offset: ClassVar[float] = 1.0
    default_rotary_part: ClassVar[float | None] = 1.0
    local_theta: ClassVar[float | None] = 10_000.0
    full_layer_every: ClassVar[int] = 1
    num_dense: ClassVar[int | None] = 3

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        return with_common_names(file)

    @classmethod
    def read_heads(cls, file: ConfigFile) -> tuple[HeadSizes, ...]:
        head_dim, kv_heads = cls.head_dim_of(file), file.num_kv_heads
        local = file.num_sliding_attention_heads or file.num_attention_heads
        counts = {FULL: file.num_attention_heads, WINDOW: local}
        return tuple(
            HeadSizes.alike(counts.get(kind, 0), kv_heads, head_dim)
            for kind in file.layer_types or ()
        )

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        scaling = file.moe_router_scaling_factor
        experts = sigmoid_experts(
            file,
            cls.num_dense or 0,
            1.0 if scaling is None else scaling,
            renormalises=file.norm_expert_weight is not False,
        )
        scalar = file.query_pre_attn_scalar
        return {
            **super().read_more(file, max_model_len),
            "attention_scale": None if scalar is None else scalar**-0.5,
            "experts": msgspec.structs.replace(
                experts,
                shared_size=number_of(file, "share_expert_dim"),
                limits=limits_of(file, "swiglu_limits"),
                dense_limits=limits_of(file, "swiglu_limits_shared"),
            ),
        }

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if (file.moe_router_activation or "sigmoid") != "sigmoid":
            yield UnsupportedField("moe_router_activation", repr(file.moe_router_activation))
        if file.use_moe_router_bias is False:
            yield UnsupportedField("use_moe_router_bias", "experts chosen without a bias")
        if file.use_head_wise_attn_gate is False or file.gating not in (True, "per-head"):
            yield UnsupportedField("use_head_wise_attn_gate", "heads without a gate each")
        if file.use_bidirectional_attention:
            yield UnsupportedField("use_bidirectional_attention", "attention to later tokens")
