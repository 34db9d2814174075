"""The plain-torch column of Mamba 2's layers, against float64."""

from __future__ import annotations

import delta_checks
import mamba_checks as check
import pending_checks
import pytest
import torch

from tandem_kernels import ops

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@dtypes
@pytest.mark.parametrize("batch", [delta_checks.DECODES, delta_checks.MIXED, delta_checks.BORDERS])
def test_mamba_scan(dtype: torch.dtype, batch: delta_checks.Batch) -> None:
    check.mamba_scan(ops.mamba_scan, batch, check.Sizes(), dtype)


def test_how_a_request_is_cut_changes_no_bit() -> None:
    check.cut_anywhere(ops.mamba_scan, check.Sizes(), torch.float32)


@pytest.mark.parametrize("most", [2, 4])
def test_drafts_change_no_bit(most: int) -> None:
    for sizes in (None, delta_checks.Sizes(key_heads=4, value_heads=4, kernel=1)):
        given = ops.causal_conv, ops.mamba_scan, torch.float32
        pending_checks.mamba_drafts(*given, sizes=sizes, most=most)


@dtypes
def test_norm_of_gated_groups(dtype: torch.dtype) -> None:
    check.gated_group_norm(ops.gated_group_norm, ops.gated_square_sums, 5, (3, 24), dtype)
