"""Checks the steps of linear layers on FP8 weights, for any column of the dispatch table."""

from __future__ import annotations

import kernel_oracle as oracle
import torch
from kernel_checks import ELEMENTWISE, Op
from torch import Tensor

from tandem_kernels.reference import fp8 as reference


def quantised_rows(
    op: Op, rows: int, width: int, group: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """The largest number of a group becomes 448, zeros stay zeros, and nothing is further off than
    half a step of e4m3."""
    x = torch.randn(rows, 2 * width, device=device).to(dtype)[:, :width]
    x[0] = 0
    x[-1] *= torch.logspace(-6, 2, width, device=device)
    numbers, scales = op(x, group)
    _check_quantised(numbers, scales, x.float(), group)


def _check_quantised(numbers: Tensor, scales: Tensor, wide: Tensor, group: int) -> None:
    size = group or wide.shape[1]
    assert numbers.dtype == torch.float8_e4m3fn and numbers.shape == wide.shape
    assert scales.dtype == torch.float32 and scales.shape == (-(-wide.shape[1] // size), len(wide))
    for index, part in enumerate(torch.split(wide, size, dim=1)):
        largest = part.abs().amax(dim=1)
        expected = torch.where(largest > 0, largest / 448, 1.0)
        torch.testing.assert_close(scales[index], expected, rtol=1e-5, atol=0)
        stored = numbers[:, index * size : (index + 1) * size].float()
        assert bool((stored.abs().amax(dim=1) == torch.where(largest > 0, 448.0, 0.0)).all())
        scaled = part / scales[index][:, None]
        step = torch.exp2(scaled.abs().clamp(min=2**-6).log2().floor() - 3)
        assert bool(((stored - scaled).abs() <= 0.5001 * step).all())


def fp8_norm_and_activation(op: tuple[Op, Op], width: int, dtype: torch.dtype, device: str) -> None:
    """Fused, they are as their two steps."""
    norm, activation = op
    x, residual = ((torch.randn(5, width, device=device) * 3).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=device).to(dtype)
    for group in (0, 128) if width % 128 == 0 else (0,):
        numbers, scales = norm(x, None, weight, 1e-5, group)
        _check_close(numbers, scales, oracle.rms_norm(x, weight, 1e-5), dtype)
        carried = residual.clone()
        numbers, scales = norm(x, carried, weight, 1e-5, group)
        total = (x.double() + residual.double()).to(dtype)
        assert torch.equal(carried, total)
        _check_close(numbers, scales, oracle.rms_norm(total, weight, 1e-5), dtype)
        gated = torch.cat((x, residual), dim=1)
        for is_gelu in (False, True):
            numbers, scales = activation(gated, is_gelu, group)
            gate = x.double()
            act = torch.nn.functional.gelu(gate, approximate="tanh") if is_gelu else None
            act = gate / (1 + (-gate).exp()) if act is None else act
            _check_close(numbers, scales, act * residual.double(), dtype)


def unscaled_products(
    columns: tuple[Op, Op, Op], width: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Checks norm, activation and scaling alone of what a GEMM left unscaled, up to 1e9."""
    scale, norm, activation = columns
    product = (torch.randn(5, 2 * width, device=device) * 1e4).to(dtype)
    product[1] *= 1e5 if dtype != torch.float16 else 1
    row_scales = 1e-4 * torch.rand(1, 5, device=device) / product.float().abs().amax(1) * 1e4
    col_scales = 0.5 + torch.rand(2 * width, device=device)
    bias = torch.randn(2 * width, device=device).to(dtype)
    exact = product.double() * row_scales.double().t() * col_scales.double()
    scaled = scale(product.clone(), row_scales, col_scales)
    assert oracle.relative_error(scaled, exact) < ELEMENTWISE[dtype]
    scaled = scale(product.clone(), row_scales, col_scales, bias)
    assert oracle.relative_error(scaled, exact + bias) < ELEMENTWISE[dtype]
    gate, up = exact.chunk(2, dim=1)
    numbers, scales = activation(product, False, 0, row_scales, col_scales)
    _check_close(numbers, scales, gate / (1 + (-gate).exp()) * up, dtype)
    half, of_columns = product[:, :width].contiguous(), col_scales[:width].contiguous()
    residual = torch.randn(5, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    for group in (None, 0):
        carried = residual.clone()
        out, scales = norm(half, carried, weight, 1e-5, group, row_scales, of_columns)
        total = exact[:, :width] + residual.double()
        assert oracle.relative_error(carried, total) < ELEMENTWISE[dtype]
        expected = oracle.rms_norm(total, weight, 1e-5)
        if group is None:
            assert oracle.relative_error(out, expected) < 2 * ELEMENTWISE[dtype]
        else:
            _check_close(out, scales, expected, dtype)


def fp8_product(op: Op, shape: tuple[int, int, int], device: str) -> None:
    """`shape` is (rows, outputs, inner)."""
    rows, outputs, inner = shape
    x, weight = (
        reference.to_e4m3(torch.randn(size, inner, device=device) * 100) for size in (rows, outputs)
    )
    exact = x.double() @ weight.double().t()
    assert oracle.relative_error(op(x, weight), exact) < 1e-2


def _check_close(numbers: Tensor, scales: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    error = oracle.relative_error(reference.dequantise_rows(numbers, scales), exact)
    assert 0.01 < error < 0.035 + ELEMENTWISE[dtype]


def fp8_gemm(
    ops_of: tuple[Op, Op], shape: tuple[int, int, int], *, blocks: bool, device: str = "cpu"
) -> None:
    """Checks GEMMs against the same quantised numbers in float64. `shape` is (rows, outputs,
    inner)."""
    linear, gated = ops_of
    rows, outputs, inner = shape
    out_dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(rows, inner, device=device)
    numbers, x_scales = reference.quantise_fp8(x, 128 if blocks else 0)
    numbers, x_scales = _with_aligned_rows(numbers, x_scales)
    weight = reference.to_e4m3(torch.randn(outputs, inner, device=device) * 30)
    size = (outputs // 128, -(-inner // 512) * 4) if blocks else (outputs,)
    w_scales = (torch.rand(size, device=device) + 0.5) / 30 * inner**-0.5
    bias = torch.randn(outputs, device=device).to(out_dtype)
    wide = reference.dequantise_rows(numbers, x_scales).double()
    exact = wide @ reference.dequantise_weight(weight, w_scales).double().t()
    # Sums in the matrix units have some 14 bits; results in half precision 8.
    bound = 1e-2 if out_dtype == torch.bfloat16 else 1e-5
    out = linear(numbers, x_scales, weight, w_scales, None, out_dtype)
    assert out.dtype == out_dtype
    assert oracle.relative_error(out, exact) < bound
    out = linear(numbers, x_scales, weight, w_scales, bias, out_dtype)
    assert oracle.relative_error(out, exact + bias) < bound
    gate, up = exact.to(out_dtype).double().chunk(2, -1)
    out = gated(numbers, x_scales, weight, w_scales, out_dtype)
    assert oracle.relative_error(out, gate / (1 + (-gate).exp()) * up) < 2 * bound


def fp8_groups(
    products: Op, written_out: Op, shape: tuple[int, int, int], device: str = "cpu"
) -> None:
    """Two groups of outputs read the two halves of a row. `shape` is (rows, outputs, inner) of a
    group."""
    rows, outputs, inner = shape
    out_dtype = torch.bfloat16 if device == "cuda" else torch.float32
    numbers, x_scales = reference.quantise_fp8(torch.randn(rows, 2 * inner, device=device), 128)
    numbers, x_scales = _with_aligned_rows(numbers, x_scales)
    weight = reference.to_e4m3(torch.randn(2 * outputs, inner, device=device) * 30)
    w_scales = torch.rand(2 * outputs // 128, -(-inner // 512) * 4, device=device) + 0.5
    wide = reference.dequantise_rows(numbers, x_scales).double()
    plain = written_out(weight, w_scales, out_dtype)
    of_weight = reference.dequantise_weight(weight, w_scales)
    assert oracle.relative_error(plain, of_weight) < (4e-3 if device == "cuda" else 1e-7)
    pairs = zip(wide.split(inner, 1), of_weight.double().split(outputs), strict=True)
    exact = torch.cat([x @ own.t() for x, own in pairs], dim=1)
    found = products(numbers, x_scales, weight, w_scales, 2, out_dtype)
    assert found.dtype == out_dtype
    assert oracle.relative_error(found, exact) < (1e-2 if device == "cuda" else 1e-5)


def _with_aligned_rows(numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in memory that goes on to a multiple of 4 rows, as kernels leave them."""
    more = -len(numbers) % 4
    padded = torch.cat(
        (numbers.view(torch.uint8), numbers.new_zeros(more, numbers.shape[1]).view(torch.uint8))
    )
    wide = torch.nn.functional.pad(scales, (0, more))
    rows = len(numbers)
    return padded.view(torch.float8_e4m3fn)[:rows], wide[:, :rows]
