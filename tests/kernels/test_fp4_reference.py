"""Four-bit floats in plain torch, against their definition in float64."""

from __future__ import annotations

import fp4_checks as check
import pytest
import torch

from tandem_kernels import ops

pytestmark = pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@dtypes
def test_weights(form: check.Form, dtype: torch.dtype) -> None:
    check.fp4_dequantise(ops.fp4_dequantise, form, (128, 96), dtype)


@dtypes
def test_products(form: check.Form, dtype: torch.dtype) -> None:
    columns = ops.fp4_gemm, ops.fp4_gate_up
    check.fp4_gemm(*columns, form, (9, 128, 160), dtype)


def test_rows_do_not_depend_on_the_batch(form: check.Form) -> None:
    check.fp4_in_fixed_order(ops.fp4_gemm, form, (20, 64, 96), torch.bfloat16)
