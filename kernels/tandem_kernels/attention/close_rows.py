"""Rows that stand for several tokens, computed as their last token is.

    tokens of a row   | in the cache | of this step |     a tile of them at a time
    [D] of each       values, gates ─ softmax state of each number ─ norm ─ rotate ─ row

A program does the row that its token closes, and most have none. The softmax is element by element,
and is added up in the order of positions, however the tokens were cut into steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.chosen_slots import request_of_token
from tandem_kernels.attention.token_rows import OpenTokens, TokenRowForm
from tandem_kernels.attention.turned_pairs import pair_angles, turned_pairs
from tandem_kernels.small_launches import in_turn, take_turn

_TILE = 8
"""Tokens at once, at most."""


@triton.jit(do_not_specialize=["num_reqs"])
def close_rows_kernel(
    x: tl.tensor,
    pages: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    cos_sin_cache: tl.tensor,
    out: tl.tensor,
    num_reqs: tl.tensor,
    x_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    QUERY_LEN: tl.constexpr,
    TOKENS: tl.constexpr,
    SERIES: tl.constexpr,
    FIRST: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program t, the row that token t closes, [D]; zero if it closes none.

    SERIES: 2: tokens of the row before are read in the first one, its own in the second.
    WIDTH: Of what a token leaves.
    """
    take_turn(OVERLAP)
    token = tl.program_id(0)
    r = request_of_token(query_start_loc, token, num_reqs, QUERY_LEN)
    start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - start
    seq_len = tl.load(seq_lens + r)
    first = seq_len - num_tokens
    position = first + token - start
    closes = (seq_len > 0) & (token - start < num_tokens) & ((position + 1) % TOKENS == 0)
    dim = tl.arange(0, D)
    to = out + token.to(tl.int64) * D + dim
    if not closes:
        tl.store(to, tl.zeros([D], tl.float32))
        return
    lane = tl.arange(0, TILE)
    table = block_tables + r.to(tl.int64) * table_stride
    begin = position + 1 - SERIES * TOKENS
    peak = tl.full([D], -3.0e38, tl.float32)
    total = tl.zeros([D], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for part in range(0, SERIES * TOKENS, TILE):
        place = begin + part + lane
        series = part // TOKENS * (D * (SERIES - 1))
        there = place >= 0
        is_new = place >= first
        own = x + (start + place - first).to(tl.int64) * x_stride + FIRST + series
        block = tl.load(table + place // BLOCK_SIZE, mask=there & (is_new == 0), other=0)
        old = block.to(tl.int64) * block_stride + place % BLOCK_SIZE * WIDTH
        kept = pages + old + FIRST + series
        column = dim[None, :]
        of_step, of_cache = (there & is_new)[:, None], (there & (is_new == 0))[:, None]
        gate = tl.load(own[:, None] + SERIES * D + column, mask=of_step, other=0.0)
        gate += tl.load(kept[:, None] + SERIES * D + column, mask=of_cache, other=0.0)
        value = tl.load(own[:, None] + column, mask=of_step, other=0.0)
        value += tl.load(kept[:, None] + column, mask=of_cache, other=0.0)
        slot = bias + (part % TOKENS + lane)[:, None] * (SERIES * D) + series + column
        gate = tl.where(there[:, None], gate + tl.load(slot), float("-inf"))
        higher = tl.maximum(peak, tl.max(gate, axis=0))
        share = tl.exp(gate - higher[None, :])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(share, axis=0)
        acc = acc * shrink + tl.sum(share * value, axis=0)
        peak = higher
    row = acc / total
    row = row / tl.sqrt_rn(tl.sum(row * row, axis=0) / D + eps) * tl.load(weight + dim)
    cos, sin = pair_angles(cos_sin_cache, position + 1 - TOKENS, D, ROPE)
    turned = turned_pairs(row[None, :], cos[None, :], sin[None, :], 1, D)
    tl.store(to[None, :], turned)


def close_rows(
    x: Tensor,
    rows: OpenTokens,
    form: TokenRowForm,
    bias: Tensor,
    weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
) -> Tensor:
    """See `reference.token_rows.close_rows`. Positions follow from the batch."""
    metadata, pages = rows.metadata, rows.pages
    out = torch.empty((len(x), form.dim), dtype=torch.float32, device=x.device)
    if len(x) == 0:
        return out
    close_rows_kernel[(len(x),)](
        x,
        pages,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        bias,
        weight,
        cos_sin_cache,
        out,
        len(metadata.seq_lens),
        x.stride(0),
        pages.stride(0),
        metadata.block_tables.stride(0),
        eps,
        QUERY_LEN=metadata.uniform_query_len,
        TOKENS=form.tokens,
        SERIES=form.series,
        FIRST=form.first,
        D=form.dim,
        ROPE=cos_sin_cache.shape[1],
        WIDTH=x.shape[1],
        BLOCK_SIZE=pages.shape[1],
        TILE=min(_TILE, form.tokens),
        num_warps=4,
        **in_turn(x.device, len(x)),
    )
    return out
