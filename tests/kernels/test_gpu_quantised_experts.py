"""Experts with quantised weights on a GPU, against float64."""

from __future__ import annotations

import int4_checks as int4
import pytest
import quantised_expert_checks as check
import torch

from tandem_kernels import ops

pytestmark = pytest.mark.gpu
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
token_counts = pytest.mark.parametrize("num_tokens", [1, 4, 16, 33, 300])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(6)


@halves
@pytest.mark.parametrize("shape", [(1, 2048), (7, 768), (300, 200)])
def test_rows_in_e4m3(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check.quantise_rows(ops.quantise_rows, shape, dtype, "cuda")


@token_counts
@pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("sizes", [(8, 128, 2048, 768), (2, 8, 1024, 1792), (6, 60, 256, 208)])
def test_fp8_experts(num_tokens: int, sizes: tuple[int, int, int, int], blocks: bool) -> None:
    given = num_tokens, *sizes
    check.fp8_experts(ops.fp8_experts, given, torch.bfloat16, "cuda", blocks=blocks)


@halves
@pytest.mark.parametrize("num_tokens", [3, 200])
def test_fp8_experts_with_biases(num_tokens: int, dtype: torch.dtype) -> None:
    sizes = num_tokens, 4, 32, 512, 384
    check.fp8_experts(ops.fp8_experts, sizes, dtype, "cuda", clamped=True)


@token_counts
@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped"])
@pytest.mark.parametrize("sizes", [(4, 32, 2880, 2880), (8, 128, 512, 704), (2, 8, 160, 96)])
def test_mxfp4_experts(num_tokens: int, sizes: tuple[int, int, int, int], clamped: bool) -> None:
    given = num_tokens, *sizes
    check.mxfp4_experts(ops.mxfp4_experts, given, torch.bfloat16, "cuda", clamped=clamped)


def test_mxfp4_experts_in_fp16() -> None:
    check.mxfp4_experts(ops.mxfp4_experts, (33, 4, 8, 512, 384), torch.float16, "cuda")


@pytest.mark.parametrize(
    ("sizes", "group_size", "dtype"),
    [
        ((1, 8, 128, 2048, 768), 128, torch.bfloat16),
        ((33, 8, 128, 2048, 768), 128, torch.bfloat16),
        ((300, 2, 8, 1024, 1792), 64, torch.bfloat16),
        ((16, 8, 48, 7168, 256), 32, torch.float16),
    ],
)
def test_int4_experts(
    sizes: tuple[int, int, int, int, int], group_size: int, dtype: torch.dtype
) -> None:
    int4.int4_experts(ops.int4_experts, sizes, group_size, dtype, "cuda")
