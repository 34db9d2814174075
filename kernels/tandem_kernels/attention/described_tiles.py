"""Tiles of a cache as the copy engine of Hopper loads them."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.device import has_copy_engine


def described_tiles(
    kv_cache: PagedKV, tile: int, block_dim: int, window: int | None
) -> TensorDescriptor | None:
    """Returns `describe_tiles`, if there is a copy engine and no window, keys and values are of one
    width, tiles are in one block each, and rows where it can begin."""
    if window is not None or not isinstance(kv_cache, Tensor):
        return None
    if not has_copy_engine(kv_cache.device):
        return None
    *_, block_size, head_dim = kv_cache.shape
    fits = block_size % tile == 0 and tile >= 64 and head_dim * kv_cache.itemsize % 16 == 0
    return describe_tiles(kv_cache, tile, block_dim) if fits else None


def describe_tiles(kv_cache: Tensor, tile: int, block_dim: int) -> TensorDescriptor:
    """Describes the cache as [block, row of a block, D], loaded [1, tile, block_dim] at a time.

    The rows of a block are those of all heads' keys, then of all heads' values; columns behind
    D read as zero.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    shape = [num_blocks, 2 * num_kv_heads * block_size, head_dim]
    strides = [kv_cache.stride(0), head_dim, 1]
    return TensorDescriptor(kv_cache, shape, strides, [1, tile, block_dim])
