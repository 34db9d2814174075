"""Checks of operations on 4-bit weights, for any column of the dispatch table and any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import torch
from torch import Tensor

from tandem_kernels.gemm.int4_packing import pack_groups, pack_numbers

Op = Callable[..., Any]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def packed_weights(
    num_outputs: int, num_inputs: int, group_size: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes (weights [N, K] as the format defines them, packed, groups), with all numbers and
    zeros."""
    numbers = torch.randint(0, 16, (num_outputs, num_inputs))
    shape = num_outputs, num_inputs // group_size
    zeros = torch.randint(0, 16, shape)
    scales = ((torch.rand(shape) + 0.5) * num_inputs**-0.5 / 4).to(dtype)
    wide = (numbers - zeros.repeat_interleave(group_size, 1)).double()
    weights = (wide * scales.double().repeat_interleave(group_size, 1)).to(dtype)
    packed = pack_numbers(numbers, group_size)
    groups = pack_groups(scales, zeros, num_inputs, group_size)
    return weights.to(device), packed.to(device), groups.to(device)


def int4_dequantise(
    op: Op, shape: tuple[int, int], group_size: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Every weight has the bits that the format's definition gives it, rounded once."""
    weights, packed, groups = packed_weights(*shape, group_size, dtype, device)
    assert torch.equal(op(packed, groups, shape[1]), weights)


def int4_gemm(
    linear: Op,
    gated: Op,
    shape: tuple[int, int, int],
    group_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Checks both GEMMs. `shape` is (rows, outputs, inner). Rows of x lie apart, and beside them
    there is what must not count."""
    rows, outputs, inner = shape
    weights, packed, groups = packed_weights(outputs, inner, group_size, dtype, device)
    wide = torch.full((rows, 2 * inner), torch.nan, dtype=dtype, device=device)
    wide[:, :inner] = torch.randn(rows, inner, device=device)
    x = wide[:, :inner]
    bias = torch.randn(outputs, device=device).to(dtype)
    exact = x.double() @ weights.double().t()
    gate, up = exact.to(dtype).double().chunk(2, -1)
    for fixed_order in (False, True):
        plain = linear(x, packed, groups, None, fixed_order)
        biased = linear(x, packed, groups, bias, fixed_order)
        assert plain.dtype == dtype
        assert oracle.relative_error(plain, exact) < TOLERANCE[dtype]
        assert oracle.relative_error(biased, exact + bias) < TOLERANCE[dtype]
        activated = gated(x, packed, groups, fixed_order)
        assert oracle.relative_error(activated, gate * gate.sigmoid() * up) < 2 * TOLERANCE[dtype]


def int4_in_fixed_order(
    op: Op, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """A row has the same bits in any company."""
    rows, outputs, inner = shape
    _, packed, groups = packed_weights(outputs, inner, 128, dtype, device)
    x = torch.randn(rows, inner, device=device).to(dtype)
    found = op(x, packed, groups, None, True)
    for start, end in ((0, 1), (rows // 2, rows // 2 + 3), (1, rows)):
        assert torch.equal(op(x[start:end], packed, groups, None, True), found[start:end])


def int4_gemm_again(op: Op, shape: tuple[int, int, int], device: str) -> None:
    """The same call gives the same bits each time, whichever part of a sum comes last."""
    rows, outputs, inner = shape
    _, packed, groups = packed_weights(outputs, inner, 128, torch.bfloat16, device)
    x = torch.randn(rows, inner, device=device).to(torch.bfloat16)
    first = op(x, packed, groups)
    assert all(torch.equal(op(x, packed, groups), first) for _ in range(50))


def int4_experts(
    op: Op,
    sizes: tuple[int, int, int, int, int],
    group_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Checks tokens of which one goes to no expert; in fixed order rows have the same bits in any
    company. `sizes`: tokens, experts of one, experts, hidden size, units of one."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    w13, packed13, groups13 = _expert_weights(
        num_experts, 2 * width, hidden, group_size, dtype, device
    )
    w2, packed2, groups2 = _expert_weights(num_experts, hidden, width, group_size, dtype, device)
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    weights = torch.rand(num_tokens, top_k, device=device)
    chosen = torch.rand(num_tokens, num_experts, device=device).argsort(-1)[:, :top_k].int()
    chosen[num_tokens // 3] = -1
    given = packed13, groups13, packed2, groups2
    exact = oracle.experts(x, w13, w2, weights, chosen)
    for fixed in (False, True):
        found = op(x, *given, weights, chosen, fixed)
        assert found.dtype == dtype and not found[num_tokens // 3].any()
        assert oracle.relative_error(found, exact) < 3 * TOLERANCE[dtype]
    for start, end in ((0, 1), (num_tokens // 2, num_tokens)):
        part = weights[start:end], chosen[start:end]
        assert torch.equal(op(x[start:end], *given, *part, True), found[start:end])


def _expert_weights(
    num_experts: int,
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
    device: str,
) -> list[Tensor]:
    """Makes what `packed_weights` does, of every expert."""
    made = [
        packed_weights(num_outputs, num_inputs, group_size, dtype, device)
        for _ in range(num_experts)
    ]
    return [torch.stack(parts) for parts in zip(*made, strict=True)]
