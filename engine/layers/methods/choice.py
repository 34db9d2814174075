"""The choice of a linear layer's method, from its scheme and the policy of its device."""

from __future__ import annotations

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import LinearMethod, LinearShare
from engine.layers.methods.plain.few_row_heads import FewRowHeads
from engine.layers.methods.plain.few_rows import FewRows
from engine.layers.methods.plain.fused_gate_up import FusedGateUp
from engine.layers.methods.plain.invariant import Invariant
from engine.layers.methods.plain.normed_heads import FusedQkv, SmallMHeads
from engine.layers.methods.plain.plain import Plain
from engine.layers.methods.plain.residual_gemm import ResidualGemm
from engine.layers.methods.plain.small_m import SmallM
from engine.layers.methods.registry import quantised_linear
from engine.quantization import Scheme


def column_method(policy: GemmPolicy, scheme: Scheme | None, share: LinearShare) -> LinearMethod:
    """Returns the method of column layers, gate·up apart."""
    return quantised_linear(scheme, _column(policy), share, policy)


def qkv_method(policy: GemmPolicy, scheme: Scheme | None, share: LinearShare) -> LinearMethod:
    """Returns the method of layers of queries, keys and values."""
    method = _column(policy)
    if policy.fused_qkv_rows > 0:
        method = FusedQkv(method, policy.fused_qkv_rows)
    if policy.small_m_heads > 0:
        method = SmallMHeads(method, policy.small_m_heads)
    if policy.few_row_heads > 0:
        method = FewRowHeads(method, policy.few_row_heads)
    return quantised_linear(scheme, method, share, policy)


def gate_up_method(policy: GemmPolicy, scheme: Scheme | None, share: LinearShare) -> LinearMethod:
    """Returns the method of gate·up and its activation."""
    method = _library(policy)
    if policy.fused_gate_up_rows > 0:
        method = FusedGateUp(method, policy.fused_gate_up_rows)
    return quantised_linear(scheme, _small_m(method, policy), share, policy)


def row_method(policy: GemmPolicy, scheme: Scheme | None, share: LinearShare) -> LinearMethod:
    """Returns the method of row layers."""
    method = _small_m(_few_rows(_library(policy), policy), policy, is_row=True)
    if policy.residual_rows > 0:
        method = ResidualGemm(method, policy.residual_rows)
    return quantised_linear(scheme, method, share, policy)


def _column(policy: GemmPolicy) -> LinearMethod:
    return _small_m(_few_rows(_library(policy), policy), policy)


def _library(policy: GemmPolicy) -> LinearMethod:
    return Invariant() if policy.deterministic else Plain()


def _few_rows(method: LinearMethod, policy: GemmPolicy) -> LinearMethod:
    if policy.few_rows == 0:
        return method
    return FewRows(method, policy.few_rows, adds=policy.adds_few_rows)


def _small_m(method: LinearMethod, policy: GemmPolicy, *, is_row: bool = False) -> LinearMethod:
    if policy.small_m_rows == 0:
        return method
    return SmallM(method, 0 if is_row else policy.small_m_rows, policy.small_m_wide_rows)
