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
product, of which the pairs are kept. Three kernels: parts of 16 tokens (`kda_parts`); P, T, U, W
and what else the walk reads, made of them (`kda_systems`); the walk (`chunk_walk`).
Source of the rule: Kimi Linear (arXiv 2510.26692), 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.chunk_systems import (
    CHUNK,
    PART,
    solver_width,
)
from tandem_kernels.linear_attention.chunk_walk import Chunks, walk_chunks
from tandem_kernels.linear_attention.delta_tuning import DeltaTuning, prompt_tuning
from tandem_kernels.linear_attention.kda_parts import kda_parts_kernel
from tandem_kernels.linear_attention.kda_systems import kda_system_kernel
from tandem_kernels.product_precision import precision_of

CHANNELS = 64
"""Channels that a program has in registers at once."""


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
    inverses = mixed.new_empty((*rows, CHUNK, CHUNK), dtype=wide)
    scores = mixed.new_empty((*rows, CHUNK, CHUNK))
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
    how = prompt_tuning(mixed.device)
    kda_parts_kernel[(CHUNK // PART * num_values, most)](
        mixed, gates, decays, a_log, dt_bias, starts, inverses, scores, chunks.reads, totals, *ends,
        gates.stride(0), key_dim**-0.5, rate_scale,
        MIXED_STRIDE=mixed.stride(0), DECAYS_STRIDE=decays.stride(0), NUM_KEYS=num_keys,
        BLOCK_KEY=block_key, FLOOR=decay_floor,
        WIDTH=solver_width(how.parts_warps, PART), num_warps=how.parts_warps, **shape,
    )  # fmt: skip
    kda_system_kernel[(num_values, most)](
        mixed, gates, starts, inverses, scores, chunks.reads, totals, chunks.changes,
        chunks.decays, *ends, mixed.stride(0), gates.stride(0), rate_scale,
        NUM_KEYS=num_keys, VALUE_DIM=value_dim, num_warps=how.channels_warps, **shape,
    )  # fmt: skip
    walk_chunks(chunks, mixed, states, metadata, out, tuning)
