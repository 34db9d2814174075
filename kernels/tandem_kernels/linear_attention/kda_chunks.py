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
product, of which the pairs are kept. Three kernels: P and T; U, W and what else the walk reads; the
walk (`chunk_walk`). Source of the rule: Kimi Linear (arXiv 2510.26692), 3.2.
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
    token_rows,
)
from tandem_kernels.linear_attention.chunk_walk import Chunks, walk_chunks
from tandem_kernels.linear_attention.delta_gates import rate_of, unit_scale
from tandem_kernels.linear_attention.delta_tuning import (
    CHANNEL_FACTORS,
    CHANNEL_SYSTEM,
    DeltaTuning,
)
from tandem_kernels.linear_attention.kda_systems import (
    kda_system_kernel,
    part_rows,
    summed_decays,
)
from tandem_kernels.product_precision import precision_of

CHANNELS = 64
"""Channels that a program has in registers at once."""


@triton.jit
def _unit_scales(
    start: tl.tensor, token: tl.tensor, inside: tl.tensor, stride: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns by what rows of tokens are multiplied to have unit length."""
    row = token_rows(start, token, inside, stride, DIM, BLOCK).to(tl.float32)
    return unit_scale(tl.sum(row * row, axis=1))


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
    lasts: tl.tensor,
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
    """Computes, in program (i, h, p), columns p * CHANNELS and on of U, turned, and of W,
    q exp(G) and k exp(G_last - G), side by side, and exp(G_last), of chunk i and value head h."""
    tile, head = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    kind = mixed.dtype.element_ty
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    queries = mixed + head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    keys = queries + NUM_KEYS * KEY_DIM
    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    query_scale = scale * _unit_scales(queries, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    key_scale = _unit_scales(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    rate = tl.load(gates + token.to(tl.int64) * gates_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, rate_of(rate.to(tl.float32), rate_scale), 0.0)
    own = tile.to(tl.int64) * NUM_VALUES + head
    line = own * CHUNK + lane
    solution = tl.load(solved + line[:, None] * CHUNK + lane[None, :])

    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    value = part_rows(values, token, inside, mixed_stride, channel, VALUE_DIM)
    change = tl.dot(solution, (value * rate[:, None]).to(kind), input_precision=PRECISION)
    to = changes + own * CHUNK * VALUE_DIM + channel[None, :] * CHUNK + lane[:, None]
    tl.store(to, change.to(kind), mask=(channel < VALUE_DIM)[None, :])

    summed = summed_decays(
        decays + head * KEY_DIM, decays_stride, a_log + head, dt_bias + head * KEY_DIM,
        token, inside, channel, KEY_DIM, FLOOR, kind,
    )  # fmt: skip
    last = tl.min(summed, axis=0)
    since = tl.exp(summed.to(tl.float32))
    key = part_rows(keys, token, inside, mixed_stride, channel, KEY_DIM) * key_scale[:, None]
    read = tl.dot(solution, (key * since * rate[:, None]).to(kind), input_precision=PRECISION)
    query = part_rows(queries, token, inside, mixed_stride, channel, KEY_DIM)
    query *= query_scale[:, None] * since
    key *= tl.exp((last[None, :] - summed).to(tl.float32))
    to = reads + line[:, None] * (3 * KEY_DIM) + channel[None, :]
    real = (channel < KEY_DIM)[None, :]
    tl.store(to, read.to(kind), mask=real)
    tl.store(to + KEY_DIM, query.to(kind), mask=real)
    tl.store(to + 2 * KEY_DIM, key.to(kind), mask=real)
    last = tl.exp(last.to(tl.float32))
    tl.store(lasts + own * KEY_DIM + channel, last, mask=channel < KEY_DIM)


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
    given = mixed, gates, decays, a_log, dt_bias, metadata.query_start_loc
    strides = mixed.stride(0), gates.stride(0), decays.stride(0)
    numbers = first_req, num_reqs, *strides, key_dim**-0.5, rate_scale
    block_key = max(16, triton.next_power_of_2(key_dim))
    shape: dict[str, Any] = {
        "NUM_KEYS": (mixed.shape[1] - num_values * value_dim) // (2 * key_dim),
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "CHANNELS": min(CHANNELS, block_key),
        "CHUNK": CHUNK,
        "FLOOR": decay_floor,
        "PRECISION": precision_of(mixed),
    }
    kda_system_kernel[rows](
        *given, scratch, scores, solved, *numbers,
        PART=PART, WIDTH=solver_width(CHANNEL_SYSTEM["num_warps"]), **shape, **CHANNEL_SYSTEM,
    )  # fmt: skip
    parts = triton.cdiv(max(key_dim, value_dim), shape["CHANNELS"])
    kda_factors_kernel[(*rows, parts)](
        *given, solved, chunks.changes, chunks.reads, chunks.decays, *numbers,
        VALUE_DIM=value_dim, BLOCK_KEY=block_key, **shape, **CHANNEL_FACTORS,
    )  # fmt: skip
    walk_chunks(chunks, mixed, states, metadata, out, tuning)
