"""The choice of the method of a layer's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.layers.expert_methods.base import ExpertMethod
from engine.layers.expert_methods.dequantised_mxfp4 import DequantisedMxfp4Experts
from engine.layers.expert_methods.fp4 import fp4_experts
from engine.layers.expert_methods.fp8 import fp8_experts
from engine.layers.expert_methods.int4 import int4_experts
from engine.layers.expert_methods.int8 import int8_experts
from engine.layers.expert_methods.plain import PlainExperts
from engine.layers.methods.registry import format_of
from engine.layers.shard import Shard
from engine.quantization import (
    Fp8Scheme,
    Int4Scheme,
    Int8Scheme,
    Mxfp4Scheme,
    Nvfp4Scheme,
    Scheme,
)
from tandem_kernels.elementwise.gate_form import GateForm, has_gate

ExpertFactory = Callable[[Any, Shard], ExpertMethod | None]
"""Is given scheme and rank; returns a method for them, or None: dequantise."""

EXPERTS: dict[type[Any], ExpertFactory] = {
    Fp8Scheme: fp8_experts,
    Int4Scheme: int4_experts,
    Int8Scheme: int8_experts,
    Mxfp4Scheme: fp4_experts,
    Nvfp4Scheme: fp4_experts,
}
"""Methods of experts that compute with quantised numbers, by scheme."""


WITH_SILU = (Int4Scheme, Int8Scheme)
"""Kernels of these know no other activation: experts that have one are dequantised. So are those
without a gate, of which no kernel of quantised experts knows."""


def expert_method(shard: Shard, scheme: Scheme | None, gate: GateForm | None) -> ExpertMethod:
    """Returns the method for experts on this rank, of an activation; None: SiLU."""
    factory = None if scheme is None else EXPERTS.get(type(scheme))
    if not has_gate(gate) or (gate is not None and isinstance(scheme, WITH_SILU)):
        factory = None
    method = None if factory is None else factory(scheme, shard)
    if method is None and isinstance(scheme, Mxfp4Scheme) and scheme.layout == "gpt-oss":
        method = DequantisedMxfp4Experts()
    return method or PlainExperts(format_of(scheme, shard.prefix))
