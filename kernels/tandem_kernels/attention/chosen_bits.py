"""Writes what queries attend to as a bit of each key, for attention that walks over all keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.chosen_slots import request_of_token
from tandem_kernels.attention.ragged_batch import RaggedBatch


@triton.jit
def _joined(
    word: tl.tensor, bits: tl.tensor, next_word: tl.tensor, next_bits: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Joins the bits of a run of positions with those of the next run, if they are of one word."""
    return next_word, tl.where(word == next_word, bits | next_bits, next_bits)


@triton.jit(
    do_not_specialize=["num_reqs", "width"],
    do_not_specialize_on_alignment=["query_bounds", "key_bounds", "first"],
)
def chosen_bits_kernel(
    chosen: tl.tensor,
    query_bounds: tl.tensor,
    key_bounds: tl.tensor,
    first: tl.tensor,
    bits: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes, in program t, the words of token t. Positions ascend: those of one word lie side by
    side, and the last of them knows all bits."""
    token = tl.program_id(0)
    r = request_of_token(query_bounds, token, num_reqs, 0)
    begin = tl.load(first + r)
    num_keys = tl.load(key_bounds + r + 1) - tl.load(key_bounds + r)
    words = bits + token.to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        tl.store(words + start + lane, lane * 0, mask=start + lane < width)
    tl.debug_barrier()
    at = chosen + token.to(tl.int64) * TOP_K + lane
    key = tl.load(at, mask=lane < TOP_K, other=-1) - begin
    behind = tl.load(at + 1, mask=lane + 1 < TOP_K, other=-1) - begin
    is_key = (key >= 0) & (key < num_keys)
    ends = (behind < 0) | (behind >= num_keys) | (behind // 32 != key // 32)
    word = tl.where(is_key, key // 32, -1)
    _, joined = tl.associative_scan((word, 1 << (key & 31)), 0, _joined)
    tl.store(words + word, joined, mask=is_key & ends)


def chosen_bits(chosen: Tensor, batch: RaggedBatch, first: Tensor) -> Tensor:
    """See `reference.ragged.chosen_bits`."""
    num_tokens, top_k = chosen.shape
    width = 2 * triton.cdiv(batch.max_key_len, 64)
    bits = torch.empty((num_tokens, width), dtype=torch.int32, device=chosen.device)
    chosen_bits_kernel[(num_tokens,)](
        chosen,
        batch.query_bounds,
        batch.key_bounds,
        first,
        bits,
        len(first),
        width,
        TOP_K=top_k,
        BLOCK=triton.next_power_of_2(top_k),
        num_warps=8,
    )
    return bits
