"""Operations on integer weights of 8 bits in plain torch."""

from __future__ import annotations

import int8_checks as check
import pytest
import torch

from tandem_kernels import ops


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows(dtype: torch.dtype) -> None:
    check.int8_rows((ops.quantise_int8, ops.rms_norm_int8, ops.silu_and_mul_int8), 5, 200, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(dtype: torch.dtype) -> None:
    check.int8_gemm((ops.int8_gemm, ops.int8_gate_up), (5, 48, 4096), dtype)


@pytest.mark.parametrize("groups", [1, 3])
def test_weights_beside_rows_in_half_precision(groups: int) -> None:
    columns = ops.int8_weight_gemm, ops.int8_weight_gate_up, ops.int8_dequantise
    check.int8_weights(columns, (5, 40, 96), groups, torch.float16)


@pytest.mark.parametrize("quantises", [False, True])
def test_experts(quantises: bool) -> None:
    check.int8_experts(ops.int8_experts, (9, 2, 4, 64, 48), torch.float32, quantises=quantises)
