"""Moving whole KV blocks of one layer between the cache and one contiguous buffer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_PROGRAM = 4096


@triton.jit
def copy_blocks_kernel(
    kv_cache: tl.tensor,
    block_ids: tl.tensor,
    blocks: tl.tensor,
    block_stride: tl.tensor,
    block_elements: tl.tensor,
    TO_CACHE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (i, j) copies chunk j of `blocks[i]` from or to block `block_ids[i]`."""
    i = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = element < block_elements
    in_cache = kv_cache + tl.load(block_ids + i).to(tl.int64) * block_stride + element
    outside = blocks + i * block_elements + element
    if TO_CACHE:
        tl.store(in_cache, tl.load(outside, mask=inside), mask=inside)
    else:
        tl.store(outside, tl.load(in_cache, mask=inside), mask=inside)


def gather_kv_blocks(kv_cache: Tensor, block_ids: Tensor) -> Tensor:
    """See `reference.kv_blocks.gather_kv_blocks`."""
    shape = (block_ids.shape[0], *kv_cache.shape[1:])
    blocks = torch.empty(shape, dtype=kv_cache.dtype, device=kv_cache.device)
    _copy(kv_cache, block_ids, blocks, to_cache=False)
    return blocks


def scatter_kv_blocks(kv_cache: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """See `reference.kv_blocks.scatter_kv_blocks`."""
    _copy(kv_cache, block_ids, blocks.contiguous(), to_cache=True)


def _copy(kv_cache: Tensor, block_ids: Tensor, blocks: Tensor, *, to_cache: bool) -> None:
    num_blocks = block_ids.shape[0]
    if num_blocks == 0:
        return
    elements = kv_cache[0].numel()
    grid = (num_blocks, triton.cdiv(elements, ELEMENTS_PER_PROGRAM))
    copy_blocks_kernel[grid](
        kv_cache,
        block_ids,
        blocks,
        kv_cache.stride(0),
        elements,
        TO_CACHE=to_cache,
        CHUNK=ELEMENTS_PER_PROGRAM,
        num_warps=8,
    )
