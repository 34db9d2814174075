"""Experts with quantised weights on a GPU, against float64."""

from __future__ import annotations

import int4_checks as int4
import pytest
import quantised_expert_checks as check
import torch

from tandem_kernels import ops
from tandem_kernels.experts.expert_tuning import ExpertTuning

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(6)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((1, 8, 128, 2048, 768), True),
        ((33, 6, 60, 256, 208), False),
        ((300, 8, 128, 1024, 384), True),
        ((700, 2, 8, 512, 384), False),
        ((700, 2, 8, 512, 640), True),
    ],
    ids=["by pair", "by expert", "sorted", "large tiles", "large tiles and blocks"],
)
def test_fp8_experts(sizes: check.Sizes, blocks: bool) -> None:
    check.fp8_experts(ops.fp8_experts, sizes, torch.bfloat16, "cuda", blocks=blocks)


def test_fp8_experts_with_biases() -> None:
    sizes = 33, 4, 32, 512, 384
    check.fp8_experts(ops.fp8_experts, sizes, torch.float16, "cuda", clamped=True)


@pytest.mark.parametrize(
    ("sizes", "clamped"),
    [
        ((1, 4, 32, 2880, 2880), True),
        ((33, 4, 32, 960, 704), False),
        ((300, 4, 32, 512, 704), True),
        ((700, 2, 8, 160, 96), True),
    ],
    ids=["by pair", "by expert", "sorted", "large tiles"],
)
def test_mxfp4_experts(sizes: check.Sizes, clamped: bool) -> None:
    check.mxfp4_experts(ops.mxfp4_experts, sizes, torch.bfloat16, "cuda", clamped=clamped)


def test_tilings_of_mxfp4_experts() -> None:
    check.mxfp4_tilings(check.FEW_ROWS, (17, 4, 32, 992, 320), torch.bfloat16, "cuda")
    check.mxfp4_tilings(check.MANY_ROWS, (100, 4, 8, 992, 320), torch.bfloat16, "cuda")


@pytest.mark.parametrize("tuning", check.EACH_PAIR, ids=lambda tuning: f"splits={tuning.splits}")
@pytest.mark.parametrize("sizes", [(1, 4, 32, 2880, 2880), (7, 4, 32, 992, 320)])
def test_mxfp4_pairs_by_themselves(tuning: ExpertTuning, sizes: check.Sizes) -> None:
    check.mxfp4_pairs(tuning, sizes, torch.bfloat16, "cuda", clamped=True)


def test_mxfp4_experts_in_fp16() -> None:
    check.mxfp4_experts(ops.mxfp4_experts, (33, 4, 8, 256, 192), torch.float16, "cuda")


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
