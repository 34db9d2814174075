"""Checks layers with integer weights of 8 bits, for any column of the dispatch table. The oracle
multiplies the same integers in float64, where sums are exact."""

from __future__ import annotations

from typing import Any

import kernel_oracle as oracle
import torch
from kernel_checks import ELEMENTWISE, Op
from torch import Tensor

Sizes = tuple[int, int, int, int, int]
"""Tokens, experts of one, experts, hidden size, units of one."""

_FLIPPED = 1e-2
"""Numbers of int8 that become their neighbours by rounding before may add so much."""
ROUNDED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def int8_rows(
    op: tuple[Op, Op, Op], rows: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """The largest number of a row becomes 127, zeros stay zeros, and nothing is further off than
    half a step; a norm and activations are as their two steps."""
    quantise, norm, activation = op
    x = torch.randn(rows, 2 * width, device=device).to(dtype)[:, :width]
    x[0] = 0
    x[-1] *= torch.logspace(-6, 2, width, device=device)
    _check_rows(*quantise(x), x.double(), 0.5001)
    plain, residual = ((torch.randn(5, width, device=device) * 3).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=device).to(dtype)
    carried = residual.clone()
    found = norm(plain, carried, weight, 1e-5)
    total = (plain.double() + residual.double()).to(dtype)
    assert torch.equal(carried, total)
    # The reference rounds a norm to the dtype before it is quantised.
    slack = 0.5001 + 127 * ELEMENTWISE[dtype]
    _check_rows(*found, oracle.rms_norm(total, weight, 1e-5), slack)
    _check_rows(*norm(plain, None, weight, 1e-5), oracle.rms_norm(plain, weight, 1e-5), slack)
    for is_gelu in (False, True):
        found = activation(torch.cat((plain, residual), dim=1), is_gelu)
        gate = plain.double()
        act = gate / (1 + (-gate).exp())
        if is_gelu:
            act = torch.nn.functional.gelu(gate, approximate="tanh")
        _check_rows(*found, act * residual.double(), slack)


def _check_rows(numbers: Tensor, scales: Tensor, wide: Tensor, slack: float) -> None:
    assert numbers.dtype == torch.int8 and numbers.shape == wide.shape
    assert scales.dtype == torch.float32 and scales.shape == (1, len(wide))
    largest = wide.abs().amax(dim=1)
    expected = torch.where(largest > 0, largest / 127, 1.0)
    torch.testing.assert_close(scales[0].double(), expected, rtol=2 * slack / 127, atol=0)
    top = numbers.int().abs().amax(dim=1)
    assert bool((top == torch.where(largest > 0, 127, 0)).all())
    off = (numbers.double() - wide / scales[0].double()[:, None]).abs()
    assert bool((off <= slack).all())


def _weights(
    outputs: int, inner: int, device: str, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes numbers [N, K], and scales and zeros [G, N]."""
    numbers = torch.randint(-128, 128, (outputs, inner), dtype=torch.int8, device=device)
    scales = (torch.rand(groups, outputs, device=device) + 0.5) / 74 * inner**-0.5
    zeros = torch.randint(-128, 128, (groups, outputs), dtype=torch.int8, device=device)
    return numbers, scales, zeros


def int8_gemm(
    columns: tuple[Op, Op],
    shape: tuple[int, int, int],
    out_dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """`shape` is (rows, outputs, inner). Sums are beyond what float32 has exactly."""
    linear, gated = columns
    rows, outputs, inner = shape
    x = torch.randint(-127, 128, (rows, inner), dtype=torch.int8, device=device)
    x[0] = 127
    x_scales = torch.rand(1, rows, device=device) / 74 + 1e-3
    weight, scales, _ = _weights(outputs, inner, device)
    weight[0] = 127
    bias = torch.randn(outputs, device=device).to(out_dtype)
    exact = x.double() @ weight.double().t() * scales.double() * x_scales.double().t()
    for given, expected in ((None, exact), (bias, exact + bias.double())):
        out = linear(x, x_scales, weight, scales[0], given, out_dtype)
        assert out.dtype == out_dtype
        assert oracle.relative_error(out, expected) < ELEMENTWISE[out_dtype]
    gate, up = exact.to(out_dtype).double().chunk(2, -1)
    out = gated(x, x_scales, weight, scales[0], out_dtype)
    error = oracle.relative_error(out, gate / (1 + (-gate).exp()) * up)
    assert error < 3 * ELEMENTWISE[out_dtype]


def int8_weights(
    columns: tuple[Op, Op, Op],
    shape: tuple[int, int, int],
    groups: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Checks GEMMs on weights in so many groups, and weights that are written out."""
    linear, gated, dequantise = columns
    rows, outputs, inner = shape
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight, scales, some_zeros = _weights(outputs, inner, device, groups)
    bias = torch.randn(outputs, device=device).to(dtype)
    for zeros in (None, some_zeros):
        wide = weight.double()
        spread = scales.double().t().repeat_interleave(inner // groups, 1)
        if zeros is not None:
            wide = wide - zeros.double().t().repeat_interleave(inner // groups, 1)
        wide = wide * spread
        assert torch.equal(dequantise(weight, scales, zeros, dtype), wide.float().to(dtype))
        exact = x.double() @ wide.t()
        assert oracle.relative_error(linear(x, weight, scales, zeros), exact) < ELEMENTWISE[dtype]
        found = linear(x, weight, scales, zeros, bias)
        assert oracle.relative_error(found, exact + bias.double()) < ELEMENTWISE[dtype]
        gate, up = exact.chunk(2, -1)
        found = gated(x, weight, scales, zeros)
        expected = gate / (1 + (-gate).exp()) * up
        assert oracle.relative_error(found, expected) < 3 * ELEMENTWISE[dtype]


def int8_experts(
    op: Op, sizes: Sizes, dtype: torch.dtype, device: str = "cpu", *, quantises: bool
) -> None:
    """Some pairs go nowhere; in fixed order rows have the same bits in any company."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    weights = torch.rand(num_tokens, top_k, device=device)
    chosen = torch.rand(num_tokens, num_experts, device=device).argsort(-1)[:, :top_k].int()
    chosen[num_tokens // 3] = -1
    w13, s13, _ = _weights(num_experts * 2 * width, hidden, device)
    w2, s2, _ = _weights(num_experts * hidden, width, device)
    w13, s13 = w13.view(num_experts, -1, hidden), s13.view(num_experts, -1)
    w2, s2 = w2.view(num_experts, -1, width), s2.view(num_experts, -1)
    wide: Any = w13.double() * s13.double()[..., None], w2.double() * s2.double()[..., None]
    rounded = _rounded if quantises else _as_it_is
    expected = oracle.experts(x, *wide, weights, chosen, rounded=rounded)
    bound = ROUNDED[dtype] + (_FLIPPED if quantises else 0)
    given = x, w13, s13, w2, s2, weights, chosen, quantises
    for fixed in (False, True):
        found = op(*given, fixed)
        assert found.dtype == dtype and not found[num_tokens // 3].any()
        assert oracle.relative_error(found, expected) < bound
    for start, end in ((0, 1), (num_tokens // 2, num_tokens)):
        part = weights[start:end], chosen[start:end], quantises
        assert torch.equal(op(x[start:end], *given[1:5], *part, True), found[start:end])


def _rounded(row: Tensor) -> Tensor:
    largest = float(row.abs().max())
    scale = largest / 127 if largest > 0 else 1.0
    return (row / scale).round() * scale


def _as_it_is(row: Tensor) -> Tensor:
    return row
