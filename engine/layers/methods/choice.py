"""The choice of a linear layer's method, from the policy of its device."""

from __future__ import annotations

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import LinearMethod
from engine.layers.methods.fused_gate_up import FusedGateUp
from engine.layers.methods.invariant import Invariant
from engine.layers.methods.plain import Plain
from engine.layers.methods.residual_gemm import ResidualGemm
from engine.layers.methods.small_m import SmallM


def column_method(policy: GemmPolicy) -> LinearMethod:
    """Returns the method of column layers, gate·up apart."""
    return _small_m(_library(policy), policy)


def gate_up_method(policy: GemmPolicy) -> LinearMethod:
    """Returns the method of gate·up and its activation."""
    method = _library(policy)
    if policy.fused_gate_up_rows > 0:
        method = FusedGateUp(method, policy.fused_gate_up_rows)
    return _small_m(method, policy)


def row_method(policy: GemmPolicy) -> LinearMethod:
    """Returns the method of row layers."""
    method = _library(policy)
    return ResidualGemm(method, policy.residual_rows) if policy.residual_rows > 0 else method


def _library(policy: GemmPolicy) -> LinearMethod:
    return Invariant() if policy.deterministic else Plain()


def _small_m(method: LinearMethod, policy: GemmPolicy) -> LinearMethod:
    return SmallM(method, policy.small_m_rows) if policy.small_m_rows > 0 else method
