"""Laguna."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.head_sizes import HeadSizes
from engine.models.config.config_file import ConfigFile, RopeFields
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.dense import GateActivation, HeadNorm, OutputGate
from engine.models.specs.experts import ExpertNames, number_of, sigmoid_experts
from engine.models.specs.windowed import WindowedSpec

_GATES: dict[bool | str, OutputGate] = {
    True: "per_head",
    "per-head": "per_head",
    "per-element": "apart",
}
_NAMES = ExpertNames(shared="shared_expert", choice_bias="experts.e_score_correction_bias")
_ROPE = RopeFields(
    full_attention=RopeFields(rope_theta=500_000.0, partial_rotary_factor=0.5),
    sliding_attention=RopeFields(rope_theta=10_000.0, partial_rotary_factor=1.0),
)
"""transformers takes it where config.json says nothing."""


class LagunaSpec(WindowedSpec, frozen=True, kw_only=True):
    """Numbers of query heads that differ by layer, each head with a softplus gate; layers with a
    window rotate as a whole, the others in part. Experts as in GLM-4.5."""

    default_head_dim: ClassVar[int | None] = 128
    default_head_norm: ClassVar[HeadNorm] = "each"
    default_rotary_part: ClassVar[float | None] = 1.0
    local_theta: ClassVar[float | None] = 10_000.0
    default_window: ClassVar[int] = 512
    full_layer_every: ClassVar[int] = 1
    num_dense: ClassVar[int | None] = 1
    gate_activation: ClassVar[GateActivation] = "softplus"
    gate_name: ClassVar[str] = "g_proj"

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        # Each kind of layer says by itself which part of a head rotates.
        rope = file.rope_parameters or _ROPE
        return msgspec.structs.replace(file, rope_parameters=rope, partial_rotary_factor=None)

    @classmethod
    def read_heads(cls, file: ConfigFile) -> tuple[HeadSizes, ...]:
        counts = of_each_layer(file, "num_attention_heads_per_layer") or ()
        head_dim = cls.head_dim_of(file)
        return tuple(HeadSizes.alike(count, file.num_kv_heads, head_dim) for count in counts)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        gate = _GATES.get(file.gating)
        if gate is None:
            raise UnsupportedField("gating", f"{file.gating!r}")
        experts = sigmoid_experts(file, 1, file.moe_routed_scaling_factor or 1.0, renormalises=True)
        return {
            **super().read_more(file, max_model_len),
            "output_gate": gate,
            "experts": msgspec.structs.replace(
                experts,
                shared_size=number_of(file, "shared_expert_intermediate_size"),
                names=_NAMES,
            ),
        }

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if file.moe_apply_router_weight_on_input:
            yield UnsupportedField("moe_apply_router_weight_on_input", "experts' inputs weighted")
        if file.moe_router_logit_softcapping:
            yield UnsupportedField("moe_router_logit_softcapping", "a soft bound of scores")
