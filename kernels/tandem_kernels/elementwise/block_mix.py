"""Attention of each token over what blocks of layers have added to its stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scored(
    at: tl.tensor,
    column: tl.tensor,
    wanted: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns a row in float32, and its score."""
    row = tl.load(at + column, mask=column < width, other=0.0).to(tl.float32)
    mean = tl.sum(row * row, axis=0) / width
    return row, tl.sum(row * wanted, axis=0) * (1.0 / tl.sqrt_rn(mean + eps))


@triton.jit(do_not_specialize=["count", "block_step"])
def mix_blocks_kernel(
    blocks: tl.tensor,
    last: tl.tensor,
    query: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    block_step: tl.tensor,
    last_step: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Mixes, in program t, the `count` blocks of token t, and the last one. A row is read once:
    sums so far are scaled when a larger score is met."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wanted = tl.load(query + column, mask=inside, other=0.0).to(tl.float32)
    wanted *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    mixed, most = _scored(last + token * last_step, column, wanted, width, eps)
    total = most * 0.0 + 1.0
    at = blocks + token * width
    for _ in range(count):
        row, score = _scored(at, column, wanted, width, eps)
        higher = tl.maximum(most, score)
        before, share = tl.exp(most - higher), tl.exp(score - higher)
        mixed = mixed * before + row * share
        total = total * before + share
        most = higher
        at += block_step
    found = (mixed / total).to(out.dtype.element_ty)
    tl.store(out + token * width + column, found, mask=inside)


def mix_blocks(blocks: Tensor, last: Tensor, query: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.block_mix.mix_blocks`."""
    num_tokens, width = last.shape
    out = torch.empty((num_tokens, width), dtype=last.dtype, device=last.device)
    if num_tokens > 0:
        block = triton.next_power_of_2(width)
        mix_blocks_kernel[(num_tokens,)](
            blocks,
            last,
            query,
            weight,
            out,
            blocks.stride(0),
            last.stride(0),
            len(blocks),
            width,
            eps,
            BLOCK=block,
            num_warps=8 if block > 2048 else 4,
        )
    return out
