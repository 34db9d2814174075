"""Triton kernels of quantised experts in Triton's interpreter, as `interpreted_kernels`."""

from __future__ import annotations

import int4_checks as int4
import pytest
import quantised_expert_checks as check
import torch
import triton
from interpreted_fixtures import rounds_to_e4m3, rows_by_themselves  # noqa: F401

from tandem_kernels import ops

pytestmark = pytest.mark.usefixtures("rounds_to_e4m3", "rows_by_themselves")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    assert triton.knobs.runtime.interpret
    torch.manual_seed(12)


@pytest.mark.parametrize(
    ("sizes", "blocks", "clamped"),
    [
        ((3, 2, 8, 160, 144), True, False),
        ((9, 2, 4, 128, 256), False, True),
        ((140, 2, 3, 128, 128), True, False),
    ],
    ids=["by pair", "by expert", "sorted"],
)
def test_fp8_experts(sizes: check.Sizes, blocks: bool, clamped: bool) -> None:
    kernel = ops.fp8_experts.kernel
    check.fp8_experts(kernel, sizes, torch.float32, blocks=blocks, clamped=clamped)


@pytest.mark.parametrize(
    ("sizes", "clamped"),
    [((3, 2, 8, 160, 96), False), ((9, 2, 4, 64, 192), True), ((140, 2, 3, 64, 64), False)],
    ids=["by pair", "by expert", "sorted"],
)
def test_mxfp4_experts(sizes: check.Sizes, clamped: bool) -> None:
    check.mxfp4_experts(ops.mxfp4_experts.kernel, sizes, torch.float32, clamped=clamped)


def test_mxfp4_experts_in_halves() -> None:
    check.mxfp4_experts(ops.mxfp4_experts.kernel, (9, 2, 4, 64, 64), torch.float16)


@pytest.mark.parametrize(
    ("sizes", "group_size"),
    [((3, 2, 8, 320, 96), 32), ((9, 2, 4, 256, 128), 64), ((140, 2, 3, 256, 128), 128)],
    ids=["by pair", "by expert", "sorted"],
)
def test_int4_experts(sizes: check.Sizes, group_size: int) -> None:
    int4.int4_experts(ops.int4_experts.kernel, sizes, group_size, torch.float16)


def test_tilings_of_mxfp4_experts() -> None:
    check.mxfp4_tilings(check.FEW_ROWS, (2, 2, 8, 160, 96), torch.float32)
    check.mxfp4_tilings(check.MANY_ROWS, (65, 2, 2, 32, 64), torch.float32)
