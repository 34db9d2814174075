"""Plain-torch norms, activation and rotary embedding against float64."""

from __future__ import annotations

import fp8_linear_checks
import kernel_checks as check
import pytest
import torch

from tandem_kernels import ops

dtypes = pytest.mark.parametrize("dtype", list(check.ELEMENTWISE), ids=str)
shapes = pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 80), (17, 333)])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@dtypes
@shapes
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    check.rms_norm(ops.rms_norm, rows, width, dtype)


@dtypes
@shapes
def test_fused_add_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    check.fused_add_rms_norm(ops.fused_add_rms_norm, rows, width, dtype)


@dtypes
def test_products_of_few_rows(dtype: torch.dtype) -> None:
    columns = ops.small_m_gemm, ops.small_m_gate_up
    check.small_m_gemm(*columns, (3, 128, 256), dtype)


@dtypes
def test_few_rows_of_any_size(dtype: torch.dtype) -> None:
    check.few_row_gemm(ops.few_row_gemm, (3, 37, 272), dtype)


@dtypes
def test_fused_gate_up_of_many_rows(dtype: torch.dtype) -> None:
    check.fused_gate_up(ops.fused_gate_up, (40, 128, 64), dtype)


@dtypes
def test_products_that_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    check.invariant_gemm(ops.invariant_gemm, (40, 96, 80), dtype)


@dtypes
@shapes
def test_gated_activations(dtype: torch.dtype, rows: int, width: int) -> None:
    check.silu_and_mul(ops.silu_and_mul, rows, width, dtype)
    check.gelu_tanh_and_mul(ops.gelu_tanh_and_mul, rows, width, dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("head_norm", [False, True])
def test_rope_and_cache(dtype: torch.dtype, head_dim: int, head_norm: bool) -> None:
    check.rope_and_cache(
        ops.rope_and_cache, dtype, head_dim=head_dim, head_norm=head_norm, keep_k=head_norm
    )


@pytest.mark.parametrize("group", [0, 128])
@dtypes
def test_rows_of_fp8(dtype: torch.dtype, group: int) -> None:
    fp8_linear_checks.quantised_rows(ops.quantise_fp8, 5, 384, group, dtype)
    columns = ops.rms_norm_fp8, ops.silu_and_mul_fp8
    fp8_linear_checks.fp8_norm_and_activation(columns, 256, dtype, "cpu")
    fp8_linear_checks.unscaled_products((ops.scale_product, *columns), 200, dtype)


@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_products(blocks: bool) -> None:
    fp8_linear_checks.fp8_product(ops.fp8_product, (7, 48, 96), "cpu")
    fp8_linear_checks.fp8_gemm((ops.fp8_gemm, ops.fp8_gate_up), (7, 256, 384), blocks=blocks)
