"""Kimi Delta Attention for prompts, in chunks of 64 tokens: the delta rule of `delta_chunks`, where
each key channel decays by itself.

With G_i the decay of a channel since the chunk's beginning (a logarithm), and sums over channels c:

    A_ij = b_i sum k_ic k_jc exp(G_ic - G_jc)  for j < i       T = (1 + A)^-1
    P_ij = sum q_ic k_jc exp(G_ic - G_jc)      for j <= i
    U = T (b v)    W = T (b exp(G) k)          D = U - W S     o = (q exp(G)) S + P D
    S <- exp(G_last) S + (k exp(G_last - G))^T D

A and P are no products of a matrix of queries and one of keys, as exp(-G) has no bound. But between
the halves of any 2 n tokens they are: with G_m at the border between these,

    tokens    0 ..... j ..... m | m + 1 ..... i ..... 2 n       (k_i exp(G_i - G_m))
    exponents    G_m - G_j <= 0 | G_i - G_m <= 0                    . (k_j exp(G_m - G_j))

Halves of 64, 32, 16, 8, 4 and 2 tokens have each pair once; all parts of one length are one
product, of which the pairs are kept. Four kernels: parts of 16 tokens (`kda_parts`); P and T of
chunks, made of them (`kda_systems`); U, W and what else the walk reads; the walk (`chunk_walk`).
Source of the rule: Kimi Linear (arXiv 2510.26692), 3.2.
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
    solver_width,
)
from tandem_kernels.linear_attention.chunk_walk import Chunks, walk_chunks
from tandem_kernels.linear_attention.delta_gates import rate_of
from tandem_kernels.linear_attention.delta_tuning import (
    CHANNEL_FACTORS,
    CHANNEL_PARTS,
    CHANNEL_SYSTEM,
    DeltaTuning,
)
from tandem_kernels.linear_attention.kda_parts import kda_parts_kernel, part_rows
from tandem_kernels.linear_attention.kda_systems import kda_system_kernel
from tandem_kernels.product_precision import precision_of

CHANNELS = 64
"""Channels that a program has in registers at once."""


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_factors_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    query_start_loc: tl.tensor,
    factors: tl.tensor,
    totals: tl.tensor,
    solved: tl.tensor,
    changes: tl.tensor,
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
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (c, h, i), columns c * CHANNELS and on of U, turned, and of exp(G_last),
    of chunk i and value head h; and of W, q exp(G) and k exp(G_last - G), side by side, where it
    finds k grown, q grown and k shrunk."""
    head, tile = tl.program_id(1), tl.program_id(2)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    kind = mixed.dtype.element_ty
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    own = tile.to(tl.int64) * NUM_VALUES + head
    line = own * CHUNK + lane
    solution = tl.load(solved + line[:, None] * CHUNK + lane[None, :])
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    value = part_rows(values, token, inside, mixed_stride, channel, VALUE_DIM)
    rate = tl.load(gates + token.to(tl.int64) * gates_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, rate_of(rate.to(tl.float32), rate_scale), 0.0)[:, None]
    value = (value.to(tl.float32) * rate).to(kind)
    change = tl.dot(solution, value, input_precision=PRECISION)
    to = changes + own * CHUNK * VALUE_DIM + channel[None, :] * CHUNK + lane[:, None]
    tl.store(to, change.to(kind), mask=(channel < VALUE_DIM)[None, :])

    real = (channel < KEY_DIM)[None, :]
    to = factors + line[:, None] * (3 * KEY_DIM) + channel[None, :]
    key = tl.load(to, mask=real, other=0.0).to(tl.float32)
    query = tl.load(to + KEY_DIM, mask=real, other=0.0).to(tl.float32)
    shrunk = tl.load(to + 2 * KEY_DIM, mask=real, other=0.0).to(tl.float32)
    of = totals + own * (CHUNK // PART * KEY_DIM) + channel
    a = tl.load(of, mask=channel < KEY_DIM, other=0.0)
    b = tl.load(of + KEY_DIM, mask=channel < KEY_DIM, other=0.0)
    c = tl.load(of + 2 * KEY_DIM, mask=channel < KEY_DIM, other=0.0)
    d = tl.load(of + 3 * KEY_DIM, mask=channel < KEY_DIM, other=0.0)
    tl.store(lasts + own * KEY_DIM + channel, a * b * c * d, mask=channel < KEY_DIM)
    part = (lane // PART)[:, None]
    since = tl.where(part == 1, a[None, :], 1.0)
    since = tl.where(part == 2, (a * b)[None, :], since)
    since = tl.where(part == 3, (a * b * c)[None, :], since)
    until = tl.where(part == 2, d[None, :], 1.0)
    until = tl.where(part == 1, (c * d)[None, :], until)
    until = tl.where(part == 0, (b * c * d)[None, :], until)
    read = tl.dot(solution, (key * since * rate).to(kind), input_precision=PRECISION)
    tl.debug_barrier()
    tl.store(to, read.to(kind), mask=real)
    tl.store(to + KEY_DIM, (query * since).to(kind), mask=real)
    tl.store(to + 2 * KEY_DIM, (shrunk * until).to(kind), mask=real)


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
    rows, wide = (most, num_values), torch.float32
    scratch = mixed.new_empty((*rows, CHUNK, CHUNK), dtype=wide)
    scores, solved = (mixed.new_empty((*rows, CHUNK, CHUNK)) for _ in range(2))
    chunks = Chunks(
        changes=mixed.new_empty((*rows, value_dim, CHUNK)),
        reads=mixed.new_empty((*rows, CHUNK, 3 * key_dim)),
        scores=scores,
        scales=None,
        decays=mixed.new_empty((*rows, key_dim), dtype=wide),
    )
    totals = mixed.new_empty((*rows, CHUNK // PART, key_dim), dtype=wide)
    starts, ends = metadata.query_start_loc, (first_req, num_reqs)
    block_key = max(16, triton.next_power_of_2(key_dim))
    shape: dict[str, Any] = {
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "CHANNELS": min(CHANNELS, block_key),
        "CHUNK": CHUNK,
        "PART": PART,
        "PRECISION": precision_of(mixed),
    }
    num_keys = (mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
    kda_parts_kernel[(CHUNK // PART * num_values, most)](
        mixed, gates, decays, a_log, dt_bias, starts, scratch, scores, chunks.reads, totals, *ends,
        mixed.stride(0), gates.stride(0), decays.stride(0), key_dim**-0.5, rate_scale,
        NUM_KEYS=num_keys, BLOCK_KEY=block_key, FLOOR=decay_floor, **shape, **CHANNEL_PARTS,
    )  # fmt: skip
    kda_system_kernel[(num_values, most)](
        gates, starts, scratch, scores, chunks.reads, totals, solved, *ends, gates.stride(0),
        rate_scale, WIDTH=solver_width(CHANNEL_SYSTEM["num_warps"]), **shape, **CHANNEL_SYSTEM,
    )  # fmt: skip
    pieces = triton.cdiv(max(key_dim, value_dim), shape["CHANNELS"])
    kda_factors_kernel[(pieces, num_values, most)](
        mixed, gates, starts, chunks.reads, totals, solved, chunks.changes, chunks.decays, *ends,
        mixed.stride(0), gates.stride(0), rate_scale,
        NUM_KEYS=num_keys, VALUE_DIM=value_dim, **shape, **CHANNEL_FACTORS,
    )  # fmt: skip
    walk_chunks(chunks, mixed, states, metadata, out, tuning)
