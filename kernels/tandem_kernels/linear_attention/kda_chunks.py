"""Kimi Delta Attention for prompts, in chunks of 64 tokens: the delta rule of `delta_chunks`, where
each key channel decays by itself.

With G_i the decay of a channel since the chunk's beginning (a logarithm), and sums over channels c:

    A_ij = b_i sum k_ic k_jc exp(G_ic - G_jc)  for j < i       T = (1 + A)^-1
    P_ij = sum q_ic k_jc exp(G_ic - G_jc)      for j <= i
    U = T (b v)    W = T (b exp(G) k)          D = U - W S     o = (q exp(G)) S + P D
    S <- exp(G_last) S + (k exp(G_last - G))^T D

A and P are no products of a matrix of queries and one of keys, as exp(-G) has no bound. They are
computed in parts of 16 tokens:

    columns     0 ........ part's beginning ........ own part
    row i       (q_i exp(G_i - G_begin)) . (k_j exp(G_begin - G_j))     one by one, j from the last

where every exponent is a sum of decays, none a difference, so that none is above 0 and nothing is
cancelled. Four kernels: A and P of all parts, with T of each part alone; T of all chunks, block by
block; U, W and what else the walk reads; the walk, chunk after chunk. Source: Kimi Linear
(arXiv 2510.26692), 3.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.chunk_systems import CHUNK, PART, chunk_of, solve_kernel
from tandem_kernels.linear_attention.delta_gates import channel_decays, rate_of
from tandem_kernels.linear_attention.delta_tuning import (
    CHUNK_WARPS,
    DeltaTuning,
    channel_walk_tuning,
)
from tandem_kernels.linear_attention.kda_systems import (
    kda_scores_kernel,
    part_rows,
    unit_scales,
)

CHANNELS = 32
"""Channels that a program has in registers at once."""


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_factors_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    decays: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    solved: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    kept: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    decays_stride: tl.tensor,
    scale: tl.tensor,
    rate_scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (i, h, j), channels j * CHANNELS and on of chunk i and value head h: U;
    W, q exp(G) and k exp(G_last - G), three rows of `reads` for each token; and exp(G_last)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    kind = mixed.dtype.element_ty
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    key_head = head // (NUM_VALUES // NUM_KEYS)
    queries = mixed + key_head * KEY_DIM
    keys = mixed + (NUM_KEYS + key_head) * KEY_DIM
    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    decays += head * KEY_DIM
    dt_bias += head * KEY_DIM
    query_scale = scale * unit_scales(queries, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    key_scale = unit_scales(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    rate = tl.load(gates + token.to(tl.int64) * gates_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, rate_of(rate.to(tl.float32), rate_scale), 0.0)
    line = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK + lane
    solution = tl.load(solved + line[:, None] * CHUNK + lane[None, :])

    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    value = part_rows(values, token, inside, mixed_stride, channel, VALUE_DIM)
    change = tl.dot(solution, (value * rate[:, None]).to(kind), input_precision=PRECISION)
    to = changes + line[:, None] * VALUE_DIM + channel[None, :]
    tl.store(to, change.to(kind), mask=(channel < VALUE_DIM)[None, :])

    decay = channel_decays(
        decays, decays_stride, a_log + head, dt_bias, token, inside, channel, KEY_DIM, FLOOR
    )
    behind = channel_decays(
        decays, decays_stride, a_log + head, dt_bias,
        token + 1, (token + 1 < stop) & (lane + 1 < CHUNK), channel, KEY_DIM, FLOOR,
    )  # fmt: skip
    since = tl.exp(tl.cumsum(decay, axis=0))
    key = part_rows(keys, token, inside, mixed_stride, channel, KEY_DIM) * key_scale[:, None]
    read = tl.dot(solution, (key * since * rate[:, None]).to(kind), input_precision=PRECISION)
    query = part_rows(queries, token, inside, mixed_stride, channel, KEY_DIM)
    query *= query_scale[:, None] * since
    key *= tl.exp(tl.cumsum(behind, axis=0, reverse=True))
    to = reads + line[:, None] * (3 * KEY_DIM) + channel[None, :]
    real = (channel < KEY_DIM)[None, :]
    tl.store(to, read.to(kind), mask=real)
    tl.store(to + KEY_DIM, query.to(kind), mask=real)
    tl.store(to + 2 * KEY_DIM, key.to(kind), mask=real)
    last = kept + (tile.to(tl.int64) * NUM_VALUES + head) * KEY_DIM + channel
    tl.store(last, tl.exp(tl.sum(decay, axis=0)), mask=channel < KEY_DIM)


@triton.jit(do_not_specialize=["first_req"])
def kda_walk_kernel(
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    scores: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    kept: tl.tensor,
    out: tl.tensor,
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

    kind = out.dtype.element_ty
    tile = (start - first_req) // CHUNK + r - first_req
    lane = tl.arange(0, CHUNK)
    seen = lane[:, None] >= lane[None, :]
    for first in range(start, stop, CHUNK):
        token = first + lane
        inside = token < stop
        line = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK + lane
        of_token = reads + line[:, None] * (3 * KEY_DIM) + row[None, :]
        before = state.to(kind)
        change = tl.load(
            changes + line[:, None] * VALUE_DIM + column[None, :], mask=in_value[None, :], other=0.0
        ).to(tl.float32)
        read = tl.load(of_token, mask=in_key[None, :], other=0.0)
        change -= tl.dot(read, before, input_precision=PRECISION)
        query = tl.load(of_token + KEY_DIM, mask=in_key[None, :], other=0.0)
        found = tl.dot(query, before, input_precision=PRECISION)
        score = tl.load(
            scores + line[:, None] * CHUNK + lane[None, :], mask=seen & inside[:, None], other=0.0
        )
        found = tl.dot(score, change.to(kind), found, input_precision=PRECISION)
        to = out + (token.to(tl.int64) * NUM_VALUES + head)[:, None] * VALUE_DIM + column[None, :]
        tl.store(to, found.to(kind), mask=inside[:, None] & in_value[None, :])
        key = tl.load(of_token + 2 * KEY_DIM, mask=in_key[None, :], other=0.0)
        last = kept + (tile.to(tl.int64) * NUM_VALUES + head) * KEY_DIM + row
        state *= tl.load(last, mask=in_key, other=0.0)[:, None]
        state = tl.dot(tl.trans(key), change.to(kind), state, input_precision=PRECISION)
        tile += 1
    tl.store(place, state, mask=real)


def kda_chunks(
    mixed: Tensor,
    gates: Tensor,
    decays: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    tuning: DeltaTuning | None = None,
    *,
    rate_scale: float = 1.0,
    decay_floor: float = 0.0,
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
    rows = most, num_values, CHUNK
    lower = torch.empty((*rows, CHUNK), dtype=torch.float32, device=mixed.device)
    scores, solved, changes, reads = (
        mixed.new_empty((*rows, width)) for width in (CHUNK, CHUNK, value_dim, 3 * key_dim)
    )
    last = torch.empty((most, num_values, key_dim), dtype=torch.float32, device=mixed.device)
    starts, ends = metadata.query_start_loc, (first_req, num_reqs)
    given = mixed, gates, decays, a_log, dt_bias, starts
    numbers = (
        *ends, mixed.stride(0), gates.stride(0), decays.stride(0), key_dim**-0.5, rate_scale
    )  # fmt: skip
    shape = {
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "BLOCK_KEY": max(16, triton.next_power_of_2(key_dim)),
        "CHUNK": CHUNK,
        "PRECISION": _precision(mixed),
    }
    of_keys = {
        "NUM_KEYS": (mixed.shape[1] - num_values * value_dim) // (2 * key_dim),
        "CHANNELS": CHANNELS,
        "FLOOR": decay_floor,
        "num_warps": CHUNK_WARPS,
    }
    kda_scores_kernel[(most, num_values, CHUNK // PART)](
        *given, lower, scores, *numbers, PART=PART, **shape, **of_keys
    )
    solve_kernel[(most, num_values)](
        starts, lower, solved, *ends,
        NUM_VALUES=num_values, CHUNK=CHUNK, PART=PART,
        SOLVER="ieee" if mixed.dtype == torch.float32 else "tf32x3", num_warps=CHUNK_WARPS,
    )  # fmt: skip
    kda_factors_kernel[(most, num_values, triton.cdiv(max(key_dim, value_dim), CHANNELS))](
        *given, solved, changes, reads, last, *numbers, VALUE_DIM=value_dim, **shape, **of_keys
    )
    walk = tuning or channel_walk_tuning()
    _walk(scores, changes, reads, last, states, metadata, out, walk)


def _walk(
    scores: Tensor,
    changes: Tensor,
    reads: Tensor,
    last: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    tuning: DeltaTuning,
) -> None:
    """Walks through the chunks of all requests behind the decodes, with what has been computed of
    them."""
    _, num_values, key_dim, value_dim = states.shape
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    kda_walk_kernel[(num_reqs - first_req, num_values, triton.cdiv(value_dim, tuning.values))](
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        scores,
        changes,
        reads,
        last,
        out,
        first_req,
        states.stride(0),
        NUM_VALUES=num_values,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=max(16, triton.next_power_of_2(key_dim)),
        VALUES=tuning.values,
        CHUNK=CHUNK,
        PRECISION=_precision(out),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _precision(x: Tensor) -> str:
    """Returns how products of float32 are computed."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
