"""Copies of whole blocks of the KV cache, over all layers, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
_WORDS = (torch.int64, torch.int32, torch.int16)


@triton.jit(do_not_specialize=["slot_stride", "block_stride", "page_words"])
def block_copies_kernel(
    pages: tl.tensor,
    copies: tl.tensor,
    slot_stride: tl.tensor,
    block_stride: tl.tensor,
    page_words: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Copies, in program (c, s, j), chunk j of the page that copy c names in slot s."""
    copy = tl.program_id(0)
    source = tl.load(copies + 2 * copy).to(tl.int64)
    if source < 0:
        return
    target = tl.load(copies + 2 * copy + 1).to(tl.int64)
    slot = pages + tl.program_id(1).to(tl.int64) * slot_stride
    place = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = place < page_words
    words = tl.load(slot + source * block_stride + place, mask=inside)
    tl.store(slot + target * block_stride + place, words, mask=inside)


def copy_blocks(pages: Tensor, copies: Tensor) -> None:
    """See `reference.batch.copy_blocks`."""
    if copies.shape[0] == 0:
        return
    words = pages
    for dtype in _WORDS:
        if pages.shape[2] % dtype.itemsize == 0:
            words = pages.view(dtype)
            break
    page_words = words.shape[2]
    grid = (copies.shape[0], words.shape[0], triton.cdiv(page_words, CHUNK))
    block_copies_kernel[grid](
        words, copies, words.stride(0), words.stride(1), page_words, CHUNK=CHUNK, num_warps=4
    )
