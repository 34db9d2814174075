"""Tokens that a request may not choose, as one bit a token.

Logits are not read: words of the mask come in, 4 bytes for 32 tokens, and -inf goes out where a
token is forbidden. So one pass serves all that follows, filters and the draw, at less than half of
what a pass over the logits costs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def mask_logits_kernel(
    logits: tl.tensor,
    masks: tl.tensor,
    entries: tl.tensor,
    logits_stride: tl.tensor,
    masks_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Masks, in program (s, j), tokens j * BLOCK and on of row s."""
    s = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + s).to(tl.int64)
    if entry < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    words = tl.load(masks + entry * masks_stride + token // 32, mask=inside, other=0)
    forbidden = ((words >> (token % 32)) & 1) == 0
    tl.store(logits + s * logits_stride + token, float("-inf"), mask=inside & forbidden)


def mask_logits(logits: Tensor, masks: Tensor, entries: Tensor) -> None:
    """See `reference.sampling.mask_logits`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    mask_logits_kernel[(num_rows, triton.cdiv(vocab_size, block))](
        logits,
        masks,
        entries,
        logits.stride(0),
        masks.stride(0),
        vocab_size,
        BLOCK=block,
        num_warps=8,
    )
