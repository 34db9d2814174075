"""Layers with integer weights of 8 bits on a CUDA device, against float64."""

from __future__ import annotations

import int8_checks as check
import pytest
import torch
from gpu_fixtures import HALVES, halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.gemm import int8_gemm
from tandem_kernels.gemm.int8_gemm import Int8Tuning

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@halves
@pytest.mark.parametrize("rows", [1, 7, 2049])
def test_rows(dtype: torch.dtype, rows: int) -> None:
    columns = ops.quantise_int8, ops.rms_norm_int8, ops.silu_and_mul_int8
    for width in (896, 4096, 14336):
        check.int8_rows(columns, rows, width, dtype, "cuda")


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 64, 65, 130, 2049])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1536, 2304), (272, 1040)])
def test_products(rows: int, shape: tuple[int, int]) -> None:
    """Rows that are no multiple of anything, and sizes that are no whole tiles."""
    check.int8_gemm((ops.int8_gemm, ops.int8_gate_up), (rows, *shape), BF16, "cuda")


@pytest.mark.parametrize(
    "tuning",
    [
        Int8Tuning(64, 128, 128, 4, 5),
        Int8Tuning(64, 256, 128, 4, 3),
        Int8Tuning(128, 128, 128, 4, 4),
        Int8Tuning(128, 128, 128, 8, 5),
        Int8Tuning(128, 256, 128, 8, 3),
        Int8Tuning(256, 128, 128, 8, 3),
    ],
    ids=str,
)
def test_tiles(tuning: Int8Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_gemm, "int8_tuning", lambda *_: tuning)
    monkeypatch.setattr(int8_gemm, "SMALL_ROWS", 0)
    columns = ops.int8_gemm, ops.int8_gate_up
    for rows in (3, 300):
        check.int8_gemm(columns, (rows, 1040, 2304), BF16, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize(
    ("shape", "groups"), [((4096, 4096), 1), ((4096, 4096), 32), ((896, 4864), 152), ((72, 96), 1)]
)
def test_weights_beside_rows_in_half_precision(
    dtype: torch.dtype, rows: int, shape: tuple[int, int], groups: int
) -> None:
    columns = ops.int8_weight_gemm, ops.int8_weight_gate_up, ops.int8_dequantise
    check.int8_weights(columns, (rows, *shape), groups, dtype, "cuda")


@pytest.mark.parametrize("quantises", [False, True], ids=["w8a16", "w8a8"])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 8, 128, 2048, 768),
        (33, 6, 60, 256, 208),
        (300, 8, 128, 1024, 384),
        (700, 2, 8, 512, 384),
    ],
    ids=["by pair", "by expert", "sorted", "large tiles"],
)
def test_experts(sizes: check.Sizes, quantises: bool) -> None:
    check.int8_experts(ops.int8_experts, sizes, BF16, "cuda", quantises=quantises)
