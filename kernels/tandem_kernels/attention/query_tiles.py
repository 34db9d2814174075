"""Tiles of a step's query tokens, each of one request: which request, and how much a token sees."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.prefill_attention import request_of


@triton.jit
def request_of_tile(
    query_start_loc: tl.tensor,
    tile: tl.tensor,
    num_reqs: tl.tensor,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Returns the request of a tile, its first query row, and the first token of the tile."""
    if QUERY_LEN > 0:
        r = tile
        first_token = tile * 0
    else:
        r = request_of(query_start_loc, tile, 0, num_reqs, BLOCK_Q)
        start = tl.load(query_start_loc + r)
        first_token = (tile - start // BLOCK_Q - r) * BLOCK_Q
    return r, tl.load(query_start_loc + r), first_token


@triton.jit
def row_of_tile(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    local: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Returns the token of a row, -1: none, and how many scores it has."""
    r, query_start, first_token = request_of_tile(
        query_start_loc, first_tile + local // BLOCK_Q, num_reqs, QUERY_LEN, BLOCK_Q
    )
    token = first_token + local % BLOCK_Q
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    length = (tl.load(seq_lens + r) - num_tokens + token + 1) // TOKENS
    return tl.where(token < num_tokens, query_start + token, -1), length
