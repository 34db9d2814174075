"""The gated delta rule for prompts, in chunks of 64 tokens.

Within a chunk, what each token changes depends on all before it through a triangular system. With
keys k, values v, rates b and the decay G_i since the chunk's beginning (a logarithm):

    A_ij = b_i (k_i . k_j) exp(G_i - G_j)  for j < i       T = (1 + A)^-1
    U = T (b v)        W = T (b exp(G) k)                  independent of the state: all at once
    D = U - W S        what the chunk changes, S: the state before it
    o = (q exp(G)) S + (q k^T * exp(G_i - G_j) for j <= i) D
    S <- exp(G_last) S + (k exp(G_last - G))^T D           chunk after chunk

Five kernels: A and T of all chunks (`chunk_systems`); U, W and the decayed keys; a walk through the
chunks of each request with a part of the state in registers, which does nothing but D and S, since
all else waits for it; o. Each holds what fits into the registers of two warps. Source: Yang et al.,
Gated Delta Networks, 2024 (its WY form).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.chunk_systems import (
    CHUNK,
    PART,
    chunk_of,
    part_inverse,
    solve_kernel,
    token_rows,
)
from tandem_kernels.linear_attention.delta_gates import decay_and_rate, unit_length
from tandem_kernels.linear_attention.delta_tuning import CHUNK_WARPS, DeltaTuning, walk_tuning

OUTPUT_VALUES = 64
"""Columns of a state that a program reads for the tokens of a chunk."""


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


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def delta_system_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    lower: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    rate_scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (i, h, p), rows of A [chunks, Hv, CHUNK, CHUNK] of part p of chunk i for
    value head h, with T of the part alone in place of its own block."""
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first + part * PART >= stop:
        return
    lane, column = tl.arange(0, PART), tl.arange(0, CHUNK)
    own = part * PART + lane
    other = first + column
    summed, rate = _chunk_gates(
        gates, gates_stride, a_log, dt_bias, rate_scale, other, other < stop, head, NUM_VALUES
    )
    is_own = own[:, None] == column[None, :]
    own_summed = tl.sum(tl.where(is_own, summed[None, :], 0.0), axis=1)
    own_rate = tl.sum(tl.where(is_own, rate[None, :], 0.0), axis=1)
    kind = mixed.dtype.element_ty
    keys = mixed + (NUM_KEYS + head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM
    token = first + own
    key = token_rows(keys, token, token < stop, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
    key = unit_length(key, 1).to(kind)
    before = column < part * PART
    earlier = token_rows(keys, other, before, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
    earlier = unit_length(earlier, 1).to(kind)
    line = ((tile.to(tl.int64) * NUM_VALUES + head) * CHUNK + own) * CHUNK
    likeness = tl.dot(key, tl.trans(earlier), input_precision=PRECISION)
    span = tl.where(before[None, :], own_summed[:, None] - summed[None, :], 0.0)
    found = likeness * tl.exp(span) * own_rate[:, None]
    tl.store(lower + line[:, None] + column[None, :], found, mask=before[None, :])
    likeness = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    below = lane[:, None] > lane[None, :]
    span = tl.where(below, own_summed[:, None] - own_summed[None, :], 0.0)
    system = tl.where(below, likeness * tl.exp(span) * own_rate[:, None], 0.0)
    tl.store(lower + line[:, None] + own[None, :], part_inverse(system, PART))


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def delta_factors_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    solved: tl.tensor,
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
    PRECISION: tl.constexpr,
) -> None:
    """Computes U, W, `kept` = k exp(G_last - G) and `lasts` = exp(G_last) of chunk i and value head
    h in program (i, h)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    kind = mixed.dtype.element_ty
    summed, rate = _chunk_gates(
        gates, gates_stride, a_log, dt_bias, rate_scale, token, inside, head, NUM_VALUES
    )
    own = tile.to(tl.int64) * NUM_VALUES + head
    line = own * CHUNK + lane
    system = tl.load(solved + line[:, None] * CHUNK + lane[None, :])
    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    value = token_rows(values, token, inside, mixed_stride, VALUE_DIM, BLOCK_VALUE).to(tl.float32)
    change = tl.dot(system, (value * rate[:, None]).to(kind), input_precision=PRECISION)
    column = tl.arange(0, BLOCK_VALUE)
    to = changes + line[:, None] * VALUE_DIM + column[None, :]
    tl.store(to, change.to(kind), mask=(column < VALUE_DIM)[None, :])
    keys = mixed + (NUM_KEYS + head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM
    key = token_rows(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
    key = unit_length(key, 1)
    column = tl.arange(0, BLOCK_KEY)
    to, in_key = line[:, None] * KEY_DIM + column[None, :], (column < KEY_DIM)[None, :]
    last = tl.min(summed, axis=0)
    tl.store(kept + to, (key * tl.exp(last - summed)[:, None]).to(kind), mask=in_key)
    tl.store(lasts + own, tl.exp(last))
    weighted = (key * (rate * tl.exp(summed))[:, None]).to(kind)
    read = tl.dot(system, weighted, input_precision=PRECISION)
    tl.store(reads + to, read.to(kind), mask=in_key)


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
    r, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
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
    given = mixed, gates, a_log, dt_bias
    numbers = first_req, num_reqs, mixed.stride(0), gates.stride(0), rate_scale
    starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
    shape = {
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": max(16, triton.next_power_of_2(key_dim)),
        "CHUNK": CHUNK,
        "PRECISION": "ieee" if mixed.dtype == torch.float32 else "tf32",
    }
    of_keys = {
        "NUM_KEYS": (mixed.shape[1] - num_values * value_dim) // (2 * key_dim),
        "num_warps": num_warps,
    }
    changes, reads, kept, lasts = _factors(given, starts, numbers, most, shape, of_keys)
    befores = mixed.new_empty((most, num_values, key_dim, value_dim))
    delta_walk_kernel[(num_reqs - first_req, num_values, triton.cdiv(value_dim, tuning.values))](
        states, metadata.blocks, starts, seq_lens, changes, reads, kept, lasts, befores, first_req,
        states.stride(0),
        VALUES=tuning.values, num_warps=tuning.num_warps, num_stages=tuning.num_stages, **shape,
    )  # fmt: skip
    values = min(OUTPUT_VALUES, max(16, triton.next_power_of_2(value_dim)))
    delta_output_kernel[(most, num_values, triton.cdiv(value_dim, values))](
        *given, starts, seq_lens, changes, befores, out, *numbers, key_dim**-0.5,
        VALUES=values, **shape, **of_keys,
    )  # fmt: skip


def _factors(
    given: tuple[Tensor, ...],
    starts: Tensor,
    numbers: tuple[float, ...],
    most: int,
    shape: dict[str, Any],
    of_keys: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns U [most, Hv, CHUNK, V], W and decayed keys [most, Hv, CHUNK, K], and decays of whole
    chunks [most, Hv] float32."""
    mixed, num_values, value_dim = given[0], shape["NUM_VALUES"], shape["VALUE_DIM"]
    rows = most, num_values, CHUNK
    lower = mixed.new_empty((*rows, CHUNK), dtype=torch.float32)
    widths = CHUNK, value_dim, shape["KEY_DIM"], shape["KEY_DIM"]
    solved, changes, reads, kept = (mixed.new_empty((*rows, width)) for width in widths)
    lasts = mixed.new_empty((most, num_values), dtype=torch.float32)
    of_system = {name: value for name, value in shape.items() if name != "VALUE_DIM"}
    delta_system_kernel[(most, num_values, CHUNK // PART)](
        *given, starts, lower, *numbers, PART=PART, **of_system, **of_keys
    )
    solve_kernel[(most, num_values)](
        starts, lower, solved, *numbers[:2],
        NUM_VALUES=num_values, CHUNK=CHUNK, PART=PART,
        SOLVER="ieee" if mixed.dtype == torch.float32 else "tf32x3",
        num_warps=of_keys["num_warps"],
    )  # fmt: skip
    delta_factors_kernel[(most, num_values)](
        *given, starts, solved, changes, reads, kept, lasts, *numbers,
        BLOCK_VALUE=max(16, triton.next_power_of_2(value_dim)), **shape, **of_keys,
    )  # fmt: skip
    return changes, reads, kept, lasts
