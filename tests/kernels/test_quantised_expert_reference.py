"""Experts with quantised weights, in plain torch, against float64."""

from __future__ import annotations

import pytest
import quantised_expert_checks as check
import torch

from tandem_kernels import ops


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_e4m3(dtype: torch.dtype) -> None:
    check.quantise_rows(ops.quantise_rows, (5, 300), dtype)


@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped"])
@pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])
def test_fp8_experts(blocks: bool, clamped: bool) -> None:
    sizes = (13, 3, 8, 160, 144)
    check.fp8_experts(ops.fp8_experts, sizes, torch.float32, blocks=blocks, clamped=clamped)
    check.fp8_experts(ops.fp8_experts, sizes, torch.bfloat16, blocks=blocks, clamped=clamped)
