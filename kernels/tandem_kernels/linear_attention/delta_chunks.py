"""The gated delta rule for prompts, in chunks of 64 tokens.

Within a chunk, what each token changes depends on all before it through a triangular system. With
keys k, values v, rates b and the decay G_i since the chunk's beginning (a logarithm):

    A_ij = b_i (k_i . k_j) exp(G_i - G_j)  for j < i       T = (1 + A)^-1
    U = T (b v)        W = T (b exp(G) k)                  independent of the state: all at once
    D = U - W S        what the chunk changes, S: the state before it
    o = (q exp(G)) S + (q k^T * exp(G_i - G_j) for j <= i) D
    S <- exp(G_last) S + (k exp(G_last - G))^T D           chunk after chunk

Three kernels: U, W and the decayed keys of every chunk; a walk through the chunks of each request
with a part of the state in registers, which does nothing but D and S, since all else waits for it;
o of every chunk. Source: Yang et al., Gated Delta Networks, 2024 (its WY form).
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
OUTPUT_VALUES = 64
"""Columns of a state that a program reads for the tokens of a chunk."""


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


@triton.jit
def _chunk_of(
    query_start_loc: tl.tensor, tile: tl.tensor, first_req: tl.tensor, num_reqs: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Returns (request, first token, end of its tokens) of chunk `tile`."""
    r = request_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    start = tl.load(query_start_loc + r)
    first = start + (tile - (start - first_req) // CHUNK - (r - first_req)) * CHUNK
    return r, first, tl.load(query_start_loc + r + 1)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def delta_chunk_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    kept: tl.tensor,
    lasts: tl.tensor,
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
    """Computes U, W, `kept` = k exp(G_last - G) and `lasts` = exp(G_last) of chunk i and value head
    h in program (i, h)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    _, first, stop = _chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
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
    key = unit_length(key, 1).to(kind)
    likeness = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    decay = tl.exp(tl.where(row > column, summed[:, None] - summed[None, :], 0.0))
    lower = tl.where(row > column, likeness * decay * rate[:, None], 0.0)
    solved = inverse_of_lower(lower, CHUNK, PART, SOLVER).to(kind)
    line = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK + tl.arange(0, CHUNK)
    # Values, and keys again, are loaded behind the system: registers hold no more beside it.
    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    value = token_rows(values, token, inside, mixed_stride, VALUE_DIM, BLOCK_VALUE).to(tl.float32)
    change = tl.dot(solved, (value * rate[:, None]).to(kind), input_precision=PRECISION)
    column = tl.arange(0, BLOCK_VALUE)
    to = changes + line[:, None] * VALUE_DIM + column[None, :]
    tl.store(to, change.to(kind), mask=(column < VALUE_DIM)[None, :])
    full = token_rows(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
    full = unit_length(full, 1)
    column = tl.arange(0, BLOCK_KEY)
    place, in_key = line[:, None] * KEY_DIM + column[None, :], (column < KEY_DIM)[None, :]
    last = tl.min(summed, axis=0)
    tl.store(kept + place, (full * tl.exp(last - summed)[:, None]).to(kind), mask=in_key)
    tl.store(lasts + tile.to(tl.int64) * NUM_VALUES + head, tl.exp(last))
    weighted = (full * (rate * tl.exp(summed))[:, None]).to(kind)
    read = tl.dot(solved, weighted, input_precision=PRECISION)
    tl.store(reads + place, read.to(kind), mask=in_key)


@triton.jit(do_not_specialize=["first_req"])
def delta_walk_kernel(
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    kept: tl.tensor,
    lasts: tl.tensor,
    befores: tl.tensor,
    first_req: tl.tensor,
    state_stride: tl.tensor,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Walks, in program (r, h, j), through the chunks of request first_req + r for columns
    j * VALUES and on of the state of value head h. Writes D in place of U, and the state before
    each chunk into `befores` [chunks, Hv, K, V]."""
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
    of_state = row[:, None] * VALUE_DIM + column[None, :]
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
    place = states + place + of_state
    state = tl.load(place, mask=real & (seq_len > stop - start), other=0.0)

    kind = changes.dtype.element_ty
    tile = (start - first_req) // CHUNK + r - first_req
    lane = tl.arange(0, CHUNK)
    for _ in range(start, stop, CHUNK):
        own = tile.to(tl.int64) * NUM_VALUES + head
        line = own * CHUNK + lane
        of_keys = line[:, None] * KEY_DIM + row[None, :]
        to = changes + line[:, None] * VALUE_DIM + column[None, :]
        read = tl.load(reads + of_keys, mask=in_key[None, :], other=0.0)
        key = tl.load(kept + of_keys, mask=in_key[None, :], other=0.0)
        change = tl.load(to, mask=in_value[None, :], other=0.0).to(tl.float32)
        before = state.to(kind)
        tl.store(befores + own * (KEY_DIM * VALUE_DIM) + of_state, before, mask=real)
        change -= tl.dot(read, before, input_precision=PRECISION)
        tl.store(to, change.to(kind), mask=in_value[None, :])
        state *= tl.load(lasts + own)
        state = tl.dot(tl.trans(key), change.to(kind), state, input_precision=PRECISION)
        tile += 1
    tl.store(place, state, mask=real)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def delta_output_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    changes: tl.tensor,
    befores: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    rate_scale: tl.tensor,
    scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (i, h, j), columns j * VALUES and on of what the tokens of chunk i read
    of value head h."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    r, first, stop = _chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if (first >= stop) | (tl.load(seq_lens + r) == 0):
        return
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    summed, _ = _chunk_gates(
        gates, gates_stride, a_log, dt_bias, rate_scale, token, inside, head, NUM_VALUES
    )
    kind = mixed.dtype.element_ty
    key_head = head // (NUM_VALUES // NUM_KEYS)
    queries = mixed + key_head * KEY_DIM
    key = token_rows(
        queries + NUM_KEYS * KEY_DIM, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY
    ).to(tl.float32)
    key = unit_length(key, 1).to(kind)
    query = token_rows(queries, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
    query = unit_length(query, 1) * scale
    scores = tl.dot(query.to(kind), tl.trans(key), input_precision=PRECISION)
    seen = lane[:, None] >= lane[None, :]
    decay = tl.exp(tl.where(seen, summed[:, None] - summed[None, :], 0.0))
    scores = tl.where(seen, scores * decay, 0.0).to(kind)
    query = (query * tl.exp(summed)[:, None]).to(kind)
    own = tile.to(tl.int64) * NUM_VALUES + head
    row = tl.arange(0, BLOCK_KEY)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_value = (column < VALUE_DIM)[None, :]
    place = (own * KEY_DIM + row)[:, None] * VALUE_DIM + column[None, :]
    before = tl.load(befores + place, mask=(row < KEY_DIM)[:, None] & in_value, other=0.0)
    found = tl.dot(query, before, input_precision=PRECISION)
    place = (own * CHUNK + lane)[:, None] * VALUE_DIM + column[None, :]
    change = tl.load(changes + place, mask=in_value, other=0.0)
    found = tl.dot(scores, change, found, input_precision=PRECISION)
    to = out + (token.to(tl.int64) * NUM_VALUES + head)[:, None] * VALUE_DIM + column[None, :]
    tl.store(to, found.to(kind), mask=inside[:, None] & in_value)


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
        num_warps: Of a program that has a chunk to itself.
    """
    tuning = tuning or walk_tuning(mixed.element_size())
    _, num_values, key_dim, value_dim = states.shape
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    most = triton.cdiv(mixed.shape[0] - first_req, CHUNK) + num_reqs - first_req
    rows = most, num_values, CHUNK
    changes, reads, kept = (
        mixed.new_empty((*rows, width)) for width in (value_dim, key_dim, key_dim)
    )
    befores = mixed.new_empty((most, num_values, key_dim, value_dim))
    lasts = mixed.new_empty((most, num_values), dtype=torch.float32)
    is_exact = mixed.dtype == torch.float32
    given, ends = (mixed, gates, a_log, dt_bias), (first_req, num_reqs)
    numbers = *ends, mixed.stride(0), gates.stride(0), rate_scale
    shape = {
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": max(16, triton.next_power_of_2(key_dim)),
        "CHUNK": CHUNK,
        "PRECISION": "ieee" if is_exact else "tf32",
    }
    num_keys = (mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
    block_value = max(16, triton.next_power_of_2(value_dim))
    starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
    delta_chunk_kernel[(most, num_values)](
        *given, starts, changes, reads, kept, lasts, *numbers,
        NUM_KEYS=num_keys, BLOCK_VALUE=block_value, PART=PART,
        SOLVER="ieee" if is_exact else "tf32x3", num_warps=num_warps, **shape,
    )  # fmt: skip
    delta_walk_kernel[(num_reqs - first_req, num_values, triton.cdiv(value_dim, tuning.values))](
        states, metadata.blocks, starts, seq_lens, changes, reads, kept, lasts, befores, first_req,
        states.stride(0),
        VALUES=tuning.values, num_warps=tuning.num_warps, num_stages=tuning.num_stages, **shape,
    )  # fmt: skip
    values = min(OUTPUT_VALUES, block_value)
    delta_output_kernel[(most, num_values, triton.cdiv(value_dim, values))](
        *given, starts, seq_lens, changes, befores, out, *numbers, key_dim**-0.5,
        NUM_KEYS=num_keys, VALUES=values, num_warps=num_warps, **shape,
    )  # fmt: skip
