"""Finds where in the cache the tokens lie that a token attends to, and how many it sees."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata

_SLOTS = 1024
"""Counts those that a program finds."""


@triton.jit
def request_of_token(
    query_start_loc: tl.tensor, token: tl.tensor, num_reqs: tl.tensor, QUERY_LEN: tl.constexpr
) -> tl.tensor:
    """Returns the last request whose query tokens begin at or before one. Requests without any
    begin where the next one does.

    QUERY_LEN: Of each request; 0: they differ.
    """
    if QUERY_LEN > 0:
        return token // QUERY_LEN
    lo = token * 0 + 1
    hi = token * 0 + num_reqs
    while lo < hi:
        middle = (lo + hi) // 2
        if tl.load(query_start_loc + middle) <= token:
            lo = middle + 1
        else:
            hi = middle
    return lo - 1


@triton.jit
def seen_tokens(
    query_start_loc: tl.tensor, seq_lens: tl.tensor, token: tl.tensor, r: tl.tensor
) -> tl.tensor:
    """Returns how many tokens of request `r` one sees: none if it is padding."""
    first = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - first
    seq_len = tl.load(seq_lens + r)
    # A padding row has no context; one behind the last request has no place in it.
    is_real = (seq_len > 0) & (token - first < num_tokens)
    return tl.where(is_real, seq_len - num_tokens + token - first + 1, 0)


@triton.jit
def part_of_chosen(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    token: tl.tensor,
    split: tl.tensor,
    num_reqs: tl.tensor,
    QUERY_LEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns where part `split` of what a token attends to begins and ends, among at most TOP_K
    chosen tokens: parts are whole tiles."""
    r = request_of_token(query_start_loc, token, num_reqs, QUERY_LEN)
    needed = tl.minimum(seen_tokens(query_start_loc, seq_lens, token, r), TOP_K)
    count = tl.cdiv(tl.cdiv(needed, TILE), SPLITS) * TILE
    first = split * count
    return first, tl.minimum(first + count, needed)


@triton.jit(do_not_specialize=["num_reqs"])
def slots_kernel(
    chosen: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    slots: tl.tensor,
    num_reqs: tl.tensor,
    table_stride: tl.tensor,
    TOP_K: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes, in program (t, i), where BLOCK of the tokens that token t attends to lie in the
    cache, block * BLOCK_SIZE + offset; of those that it does not see, 0."""
    token = tl.program_id(0)
    r = request_of_token(query_start_loc, token, num_reqs, QUERY_LEN)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = index < tl.minimum(seen_tokens(query_start_loc, seq_lens, token, r), TOP_K)
    at = token.to(tl.int64) * TOP_K + index
    position = tl.load(chosen + at, mask=own, other=0)
    table = block_tables + r.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=own, other=0)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots + at, tl.where(own, slot, 0), mask=index < TOP_K)


def chosen_slots(chosen: Tensor, metadata: AttentionMetadata, block_size: int) -> Tensor:
    """Returns where in the cache chosen tokens lie, [T, K] int32."""
    slots = torch.empty_like(chosen)
    num_tokens, top_k = chosen.shape
    block = min(_SLOTS, triton.next_power_of_2(top_k))
    slots_kernel[(num_tokens, triton.cdiv(top_k, block))](
        chosen,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        slots,
        len(metadata.seq_lens),
        metadata.block_tables.stride(0),
        TOP_K=top_k,
        QUERY_LEN=metadata.uniform_query_len,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=4,
    )
    return slots
