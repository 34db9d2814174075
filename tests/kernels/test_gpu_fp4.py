"""Linear layers with four-bit floats on a GPU, against float64."""

from __future__ import annotations

import fp4_checks as check
import pytest
import torch
from fp4_checks import Form
from gpu_fixtures import halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.gemm import fp4_gemm
from tandem_kernels.gemm.fp4_tuning import Fp4Tuning

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(8)


@halves
@pytest.mark.parametrize("shape", [(6144, 4096), (256, 14336), (1024, 992)])
def test_products(form: Form, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of every tile of the table, and many more than its largest."""
    check.fp4_dequantise(ops.fp4_dequantise, form, shape, dtype, "cuda")
    for rows in (1, 5, 16, 17, 64, 100, 200):
        columns = ops.fp4_gemm, ops.fp4_gate_up
        check.fp4_gemm(*columns, form, (rows, *shape), dtype, "cuda")


@pytest.mark.parametrize(
    "tuning",
    [
        Fp4Tuning(8, 64, 128, 2, num_warps=1, num_stages=4, ahead=256),
        Fp4Tuning(8, 128, 64, 4, num_warps=2, num_stages=4, ahead=64),
        Fp4Tuning(16, 128, 128, 2, num_warps=4, num_stages=3),
        Fp4Tuning(64, 128, 64, 2, num_warps=8, num_stages=3),
    ],
    ids=str,
)
def test_other_tiles(form: Form, tuning: Fp4Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4_gemm, "fp4_tuning", lambda *sizes, gated: tuning)
    columns = ops.fp4_gemm, ops.fp4_gate_up
    check.fp4_gemm(*columns, form, (70, 640, 2112), torch.bfloat16, "cuda")


def test_one_order(form: Form) -> None:
    check.fp4_in_fixed_order(ops.fp4_gemm, form, (300, 4096, 4096), torch.bfloat16, "cuda")
    for shape in ((1, 4096, 14336), (33, 6144, 4096)):
        check.fp4_gemm_again(ops.fp4_gemm, form, shape, "cuda")
