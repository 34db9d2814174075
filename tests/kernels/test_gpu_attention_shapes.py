"""Attention on a CUDA device, against float64: numbers and sizes of heads."""

from __future__ import annotations

import pytest
import torch
from gpu_fixtures import HALVES, check_attention, head_dims, poisoned_and_fresh  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@head_dims
@pytest.mark.parametrize(("num_kv_heads", "group"), [(8, 1), (4, 2), (8, 4), (2, 7), (1, 16)])
def test_attention_by_shape(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype}
    check_attention([1, 17, 64, 300, 1000], [1] * 5, block_size=64, **shape)
    check_attention([33, 500, 129, 700, 5], [1, 1, 129, 77, 5], block_size=64, **shape)
    check_attention([40, 2500, 1300], [1, 2400, 1200], block_size=128, **shape)


@pytest.mark.parametrize("group", range(1, 17))
def test_attention_by_group(group: int) -> None:
    """Tries every number of query heads that share keys."""
    shape = {"num_kv_heads": 2, "group": group, "head_dim": 128, "dtype": torch.bfloat16}
    check_attention([1, 64, 777, 300, 129, 40], [1, 1, 1, 1, 129, 40], block_size=64, **shape)


@pytest.mark.parametrize("head_dim", [192, 256, 512])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_prompts_of_wide_heads(head_dim: int, window: int | None, block_size: int) -> None:
    """Tiles are larger than for few rows, and come through the copy engine or by pointers."""
    shape = {"num_kv_heads": 2, "group": 8, "head_dim": head_dim, "dtype": torch.bfloat16}
    check_attention([1300, 900], [1100, 900], block_size=block_size, window=window, **shape)
