"""Moving whole KV blocks of one layer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_kv_blocks(kv_cache: Tensor, block_ids: Tensor) -> Tensor:
    """Copy blocks `block_ids` [n] out of `kv_cache` [N, 2, Hkv, B, D]: [n, 2, Hkv, B, D]."""
    return torch.index_select(kv_cache, 0, block_ids)


def scatter_kv_blocks(kv_cache: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """Write `blocks` [n, 2, Hkv, B, D] to the blocks `block_ids` [n], all different."""
    kv_cache.index_copy_(0, block_ids.long(), blocks)
