"""The gated delta rule for prompts, in chunks of 64 tokens.

Within a chunk, what each token changes depends on all before it through a triangular system. With
keys k, values v, rates b and the decay G_i since the chunk's beginning (a logarithm):

    A_ij = b_i (k_i . k_j) exp(G_i - G_j)  for j < i       T = (1 + A)^-1
    P_ij =     (q_i . k_j) exp(G_i - G_j)  for j <= i
    U = T (b v)        W = T (b exp(G) k)                  independent of the state: all at once
    D = U - W S        what the chunk changes, S: the state before it
    o = (q exp(G)) S + P D
    S <- exp(G_last) S + (k exp(G_last - G))^T D           chunk after chunk

Three kernels: P and T, and U and W, of a chunk and head in each program; the walk through chunks
(`chunk_walk`). Queries and keys are multiplied as they come; by what they have unit length, and all
else that belongs to a token, is multiplied in float32 behind the product, or into its other side.
Source: Yang et al., Gated Delta Networks, 2024 (its WY form).
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
    solve,
    solver_width,
    token_rows,
)
from tandem_kernels.linear_attention.chunk_walk import Chunks, walk_chunks
from tandem_kernels.linear_attention.delta_gates import decay_and_rate, unit_scale
from tandem_kernels.linear_attention.delta_tuning import DeltaTuning, prompt_tuning
from tandem_kernels.product_precision import precision_of


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
def _unit_scales(rows: tl.tensor) -> tl.tensor:
    """Returns by what rows are multiplied to have unit length."""
    wide = rows.to(tl.float32)
    return unit_scale(tl.sum(wide * wide, axis=1))


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def delta_system_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    scratch: tl.tensor,
    scores: tl.tensor,
    solved: tl.tensor,
    scales: tl.tensor,
    lasts: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    scale: tl.tensor,
    rate_scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes P and T [chunks, Hv, CHUNK, CHUNK] of chunk i and value head h in program (i, h),
    what rows of (o, D, K, v, k) are multiplied by [chunks, Hv, 5, CHUNK], and exp(G_last)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    kind = mixed.dtype.element_ty
    queries = mixed + head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    keys = queries + NUM_KEYS * KEY_DIM
    key = token_rows(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    query = token_rows(queries, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    summed, rate = _chunk_gates(
        gates, gates_stride, a_log, dt_bias, rate_scale, token, inside, head, NUM_VALUES
    )
    key_scale = _unit_scales(key)
    query_scale = scale * _unit_scales(query)
    own = tile.to(tl.int64) * NUM_VALUES + head
    last = tl.min(summed, axis=0)
    since = tl.exp(summed)
    to = scales + own * (5 * CHUNK) + lane
    tl.store(to, since * query_scale)
    tl.store(to + CHUNK, tl.exp(last - summed))
    tl.store(to + 2 * CHUNK, key_scale)
    tl.store(to + 3 * CHUNK, rate)
    tl.store(to + 4 * CHUNK, rate * key_scale * since)
    tl.store(lasts + own, tl.exp(last))

    is_seen = lane[:, None] >= lane[None, :]
    decay = tl.exp(tl.where(is_seen, summed[:, None] - summed[None, :], 0.0))
    decay = tl.where(is_seen, decay * key_scale[None, :], 0.0)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    own *= CHUNK * CHUNK
    to = own + lane[:, None] * CHUNK + lane[None, :]
    tl.store(scores + to, (score * decay * query_scale[:, None]).to(kind))
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    system *= decay * (rate * key_scale)[:, None]
    system = tl.where(lane[:, None] > lane[None, :], system, 0.0)
    solution = solve(system, scratch + own, kind, CHUNK, PART, WIDTH)
    tl.store(solved + to, solution.to(kind))


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def delta_factors_kernel(
    mixed: tl.tensor,
    query_start_loc: tl.tensor,
    solved: tl.tensor,
    scales: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes U, turned, and W of chunk i and value head h in program (i, h)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    kind = mixed.dtype.element_ty
    own = tile.to(tl.int64) * NUM_VALUES + head
    line = own * CHUNK + lane
    solution = tl.load(solved + line[:, None] * CHUNK + lane[None, :])
    scale = scales + own * (5 * CHUNK) + 3 * CHUNK + lane
    keys = mixed + (NUM_KEYS + head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM
    key = token_rows(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY).to(tl.float32)
    key = (key * tl.load(scale + CHUNK)[:, None]).to(kind)
    read = tl.dot(solution, key, input_precision=PRECISION)
    column = tl.arange(0, BLOCK_KEY)
    to = reads + line[:, None] * KEY_DIM + column[None, :]
    tl.store(to, read.to(kind), mask=(column < KEY_DIM)[None, :])
    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    value = token_rows(values, token, inside, mixed_stride, VALUE_DIM, BLOCK_VALUE).to(tl.float32)
    value = (value * tl.load(scale)[:, None]).to(kind)
    change = tl.dot(solution, value, input_precision=PRECISION)
    column = tl.arange(0, BLOCK_VALUE)
    to = changes + own * CHUNK * VALUE_DIM + column[None, :] * CHUNK + lane[:, None]
    tl.store(to, change.to(kind), mask=(column < VALUE_DIM)[None, :])


def delta_chunks(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    tuning: DeltaTuning | None = None,
    rate_scale: float = 1.0,
) -> None:
    """Computes the requests of `metadata` behind its decodes; arguments as those of
    `reference.delta_rule.gated_delta_rule`.

    Args:
        out: [T, Hv, V]; rows of these requests are written.
        tuning: Of the walk; None: the choice for all shapes.
    """
    _, num_values, key_dim, value_dim = states.shape
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    most = triton.cdiv(mixed.shape[0] - first_req, CHUNK) + num_reqs - first_req
    rows, wide = (most, num_values), torch.float32
    scratch = mixed.new_empty((*rows, CHUNK, CHUNK), dtype=wide)
    scores, solved = (mixed.new_empty((*rows, CHUNK, CHUNK)) for _ in range(2))
    scales = mixed.new_empty((*rows, 5, CHUNK), dtype=wide)
    lasts = mixed.new_empty(rows, dtype=wide)
    changes = mixed.new_empty((*rows, value_dim, CHUNK))
    reads = mixed.new_empty((*rows, CHUNK, key_dim))
    starts, ends = metadata.query_start_loc, (first_req, num_reqs)
    shape: dict[str, Any] = {
        "NUM_KEYS": (mixed.shape[1] - num_values * value_dim) // (2 * key_dim),
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "BLOCK_KEY": max(16, triton.next_power_of_2(key_dim)),
        "CHUNK": CHUNK,
        "PRECISION": precision_of(mixed),
    }
    how = prompt_tuning(mixed.device)
    delta_system_kernel[rows](
        mixed, gates, a_log, dt_bias, starts, scratch, scores, solved, scales, lasts, *ends,
        mixed.stride(0), gates.stride(0), key_dim**-0.5, rate_scale,
        PART=PART, WIDTH=solver_width(how.system_warps), **shape, **how.system,
    )  # fmt: skip
    delta_factors_kernel[rows](
        mixed, starts, solved, scales, changes, reads, *ends, mixed.stride(0),
        VALUE_DIM=value_dim, BLOCK_VALUE=max(16, triton.next_power_of_2(value_dim)),
        num_warps=how.factors_warps, **shape,
    )  # fmt: skip
    chunks = Chunks(changes, reads, scores, scales, lasts)
    walk_chunks(chunks, mixed, states, metadata, out, tuning)
