"""The gated delta rule for prompts, in chunks of 64 tokens.

Within a chunk, what each token changes depends on all before it through a triangular system. With
keys k, values v, rates b and the decay G_i since the chunk's beginning (a logarithm):

    A_ij = b_i (k_i . k_j) exp(G_i - G_j)  for j < i       T = (1 + A)^-1
    U = T (b v)        W = T (b exp(G) k)                  independent of the state: all at once
    D = U - W S        what the chunk changes, S: the state before it
    o = (q exp(G)) S + (q k^T * exp(G_i - G_j) for j <= i) D
    S <- exp(G_last) S + (k exp(G_last - G))^T D           chunk after chunk

One kernel computes U and W of every chunk, another walks through the chunks of each request with a
part of the state in registers. Source: Yang et al., Gated Delta Networks, 2024 (its WY form).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.prefill_attention import request_of
from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.delta_gates import decay_and_rate, unit_length
from tandem_kernels.linear_attention.delta_tuning import CHUNK_WARPS, DeltaTuning, walk_tuning

CHUNK = 64
PART = 16
"""Rows of the triangular system that are solved one after the other; the parts are multiplied."""


@triton.jit
def inverse_of_lower(
    lower: tl.tensor, CHUNK: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Returns the inverse of 1 + `lower`, which is strictly lower triangular: [CHUNK, CHUNK].

    First that of the blocks on the diagonal, all of them row by row at once, as their columns do
    not meet; then what is left is nilpotent after CHUNK / PART = 4 products.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    same = (row // PART) == (column // PART)
    diagonal = tl.where(same, -lower, 0.0)
    inverse = tl.where(row == column, 1.0, 0.0)
    for i in range(1, PART):
        own = tl.sum(tl.where(row % PART == i, diagonal, 0.0), axis=0)
        solved = tl.sum(own[:, None] * inverse, axis=0)
        inverse += tl.where(same & (row % PART == i), solved[None, :], 0.0)
    rest = tl.dot(inverse, tl.where(same, 0.0, -lower), input_precision=PRECISION)
    twice = tl.dot(rest, rest, input_precision=PRECISION)
    series = tl.where(row == column, 1.0, 0.0) + rest + twice
    series += tl.dot(rest, twice, input_precision=PRECISION)
    return tl.dot(series, inverse, input_precision=PRECISION)


@triton.jit
def _chunk_gates(
    gates: tl.tensor,
    gates_stride: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    rate_scale: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    head: tl.tensor,
    NUM_VALUES: tl.constexpr,
) -> tl.tensor:
    """Returns (decays summed from the chunk's beginning, rates) of its tokens; behind the last
    token nothing decays and nothing is taken in."""
    own = tl.where(inside, token, 0).to(tl.int64)
    log_decay, rate = decay_and_rate(
        gates + own * gates_stride, a_log, dt_bias, rate_scale, head, NUM_VALUES
    )
    summed = tl.cumsum(tl.where(inside, log_decay, 0.0), axis=0)
    return summed, tl.where(inside, rate, 0.0)


@triton.jit
def token_rows(
    start: tl.tensor, token: tl.tensor, inside: tl.tensor, stride: tl.tensor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns rows [CHUNK, BLOCK] of tokens, zero where there is nothing."""
    column = tl.arange(0, BLOCK)
    place = start + token.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(place, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def delta_chunk_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    rate_scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVER: tl.constexpr,
) -> None:
    """Computes U and W of chunk i and value head h in program (i, h)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    r = request_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    first = start + (tile - (start - first_req) // CHUNK - (r - first_req)) * CHUNK
    if first >= stop:
        return
    token = first + tl.arange(0, CHUNK)
    inside = token < stop
    key_head = head // (NUM_VALUES // NUM_KEYS)
    kind = mixed.dtype.element_ty
    summed, rate = _chunk_gates(
        gates, gates_stride, a_log, dt_bias, rate_scale, token, inside, head, NUM_VALUES
    )
    keys = mixed + (NUM_KEYS + key_head) * KEY_DIM
    key = token_rows(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
    key = unit_length(key, 1)
    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    value = token_rows(values, token, inside, mixed_stride, VALUE_DIM, BLOCK_VALUE).to(tl.float32)
    likeness = tl.dot(key.to(kind), tl.trans(key.to(kind)), input_precision=PRECISION)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    decay = tl.exp(tl.where(row > column, summed[:, None] - summed[None, :], 0.0))
    lower = tl.where(row > column, likeness * decay * rate[:, None], 0.0)
    solved = inverse_of_lower(lower, CHUNK, PART, SOLVER).to(kind)
    change = tl.dot(solved, (value * rate[:, None]).to(kind), input_precision=PRECISION)
    weighted = key * (rate * tl.exp(summed))[:, None]
    read = tl.dot(solved, weighted.to(kind), input_precision=PRECISION)
    line = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK + tl.arange(0, CHUNK)
    column = tl.arange(0, BLOCK_VALUE)
    to = changes + line[:, None] * VALUE_DIM + column[None, :]
    tl.store(to, change.to(kind), mask=(column < VALUE_DIM)[None, :])
    column = tl.arange(0, BLOCK_KEY)
    to = reads + line[:, None] * KEY_DIM + column[None, :]
    tl.store(to, read.to(kind), mask=(column < KEY_DIM)[None, :])


@triton.jit(do_not_specialize=["first_req"])
def delta_walk_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    state_stride: tl.tensor,
    scale: tl.tensor,
    rate_scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Walks, in program (r, h, j), through the chunks of request first_req + r for columns
    j * VALUES and on of the state of value head h."""
    r = tl.program_id(0) + first_req
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + r)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    if (seq_len == 0) | (start == stop):
        return
    row = tl.arange(0, BLOCK_KEY)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = row < KEY_DIM, column < VALUE_DIM
    real = in_key[:, None] & in_value[None, :]
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
    place = states + place + row[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(place, mask=real & (seq_len > stop - start), other=0.0)

    kind = mixed.dtype.element_ty
    key_head = head // (NUM_VALUES // NUM_KEYS)
    queries = mixed + key_head * KEY_DIM
    keys = mixed + (NUM_KEYS + key_head) * KEY_DIM
    tile = (start - first_req) // CHUNK + r - first_req
    lane = tl.arange(0, CHUNK)
    seen = lane[:, None] >= lane[None, :]
    for first in range(start, stop, CHUNK):
        token = first + lane
        inside = token < stop
        summed, _ = _chunk_gates(
            gates, gates_stride, a_log, dt_bias, rate_scale, token, inside, head, NUM_VALUES
        )
        last = tl.min(summed, axis=0)
        line = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK + lane
        read = tl.load(
            reads + line[:, None] * KEY_DIM + row[None, :], mask=in_key[None, :], other=0.0
        )
        change = tl.load(
            changes + line[:, None] * VALUE_DIM + column[None, :], mask=in_value[None, :], other=0.0
        ).to(tl.float32)
        before = state.to(kind)
        change -= tl.dot(read, before, input_precision=PRECISION)
        query = token_rows(queries, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
        query = unit_length(query, 1) * scale
        key = token_rows(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
        key = unit_length(key, 1)
        scores = tl.dot(query.to(kind), tl.trans(key.to(kind)), input_precision=PRECISION)
        decay = tl.exp(tl.where(seen, summed[:, None] - summed[None, :], 0.0))
        scores = tl.where(seen, scores * decay, 0.0)
        query = query * tl.exp(summed)[:, None]
        found = tl.dot(query.to(kind), before, input_precision=PRECISION)
        found = tl.dot(scores.to(kind), change.to(kind), found, input_precision=PRECISION)
        to = out + (token.to(tl.int64) * NUM_VALUES + head)[:, None] * VALUE_DIM + column[None, :]
        tl.store(to, found.to(kind), mask=inside[:, None] & in_value[None, :])
        key = key * tl.exp(last - summed)[:, None]
        state *= tl.exp(last)
        state = tl.dot(tl.trans(key.to(kind)), change.to(kind), state, input_precision=PRECISION)
        tile += 1
    tl.store(place, state, mask=real)


def delta_chunks(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    tuning: DeltaTuning | None = None,
    num_warps: int = CHUNK_WARPS,
    rate_scale: float = 1.0,
) -> None:
    """Computes the requests of `metadata` behind its decodes; arguments as those of
    `reference.delta_rule.gated_delta_rule`.

    Args:
        out: [T, Hv, V]; rows of these requests are written.
        tuning: Of the walk; None: the choice for all shapes.
        num_warps: Of a program that solves a chunk's system.
    """
    tuning = tuning or walk_tuning()
    _, num_values, key_dim, value_dim = states.shape
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    most = triton.cdiv(mixed.shape[0] - first_req, CHUNK) + num_reqs - first_req
    rows = most, num_values, CHUNK
    changes, reads = (mixed.new_empty((*rows, width)) for width in (value_dim, key_dim))
    is_exact = mixed.dtype == torch.float32
    given, strides = (mixed, gates, a_log, dt_bias), (mixed.stride(0), gates.stride(0))
    shape = {
        "NUM_KEYS": (mixed.shape[1] - num_values * value_dim) // (2 * key_dim),
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": max(16, triton.next_power_of_2(key_dim)),
        "CHUNK": CHUNK,
        "PRECISION": "ieee" if is_exact else "tf32",
    }
    delta_chunk_kernel[(most, num_values)](
        *given,
        metadata.query_start_loc,
        changes,
        reads,
        first_req,
        *(num_reqs, *strides, rate_scale),
        BLOCK_VALUE=max(16, triton.next_power_of_2(value_dim)),
        PART=PART,
        SOLVER="ieee" if is_exact else "tf32x3",
        num_warps=num_warps,
        **shape,
    )
    delta_walk_kernel[(num_reqs - first_req, num_values, triton.cdiv(value_dim, tuning.values))](
        *given,
        states,
        *(metadata.blocks, metadata.query_start_loc, metadata.seq_lens),
        changes,
        reads,
        out,
        first_req,
        *strides,
        states.stride(0),
        key_dim**-0.5,
        rate_scale,
        VALUES=tuning.values,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **shape,
    )
