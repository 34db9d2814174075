"""The walk of delta rules through the chunks of a prompt, one after the other.

Of chunks, all is known but what depends on the state S before them (`delta_chunks`, `kda_chunks`):

    D = U - W S         o = Q S + P D         S <- decay S + K^T D

A program has some columns of a state to itself, turned: rows are values. Each product then has what
the last one ended with as its first operand, and what is read of memory as its second:

    S^T [values, keys] ── W^T ── D^T [values, tokens] ── K ── S^T of the next chunk
                       └─ Q^T ── o^T ── + D^T P^T
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.chunk_systems import CHUNK
from tandem_kernels.linear_attention.delta_tuning import DeltaTuning, walk_tuning
from tandem_kernels.product_precision import precision_of


@triton.jit(do_not_specialize=["first_req"])
def chunk_walk_kernel(
    mixed: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    changes: tl.tensor,
    reads: tl.tensor,
    scores: tl.tensor,
    scales: tl.tensor,
    decays: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    mixed_stride: tl.tensor,
    state_stride: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Walks, in program (j, h, r), through the chunks of request first_req + r for columns
    j * VALUES and on of the state of value head h; operands as those of `Chunks`."""
    head, r = tl.program_id(1), tl.program_id(2) + first_req
    seq_len = tl.load(seq_lens + r)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    if (seq_len == 0) | (start == stop):
        return
    row = tl.arange(0, BLOCK_KEY)
    column = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = (row < KEY_DIM)[None, :], (column < VALUE_DIM)[:, None]
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
    place = states + place + row[None, :] * VALUE_DIM + column[:, None]
    is_old = seq_len > stop - start
    state = tl.load(place, mask=in_key & in_value & is_old, other=0.0)

    kind = out.dtype.element_ty
    tile = (start - first_req) // CHUNK + r - first_req
    lane = tl.arange(0, CHUNK)
    queries = mixed + head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    for first in range(start, stop, CHUNK):
        own = tile.to(tl.int64) * NUM_VALUES + head
        token = first + lane
        inside = (token < stop)[:, None]
        if BY_CHANNEL:
            read_place = reads + (own * CHUNK + lane)[:, None] * (3 * KEY_DIM) + row[None, :]
            query_place, key_place = read_place + KEY_DIM, read_place + 2 * KEY_DIM
        else:
            read_place = reads + (own * CHUNK + lane)[:, None] * KEY_DIM + row[None, :]
            query_place = queries + token.to(tl.int64)[:, None] * mixed_stride + row[None, :]
            key_place = query_place + NUM_KEYS * KEY_DIM
        read = tl.load(read_place, mask=in_key, other=0.0)
        query = tl.load(query_place, mask=in_key & inside, other=0.0)
        key = tl.load(key_place, mask=in_key & inside, other=0.0)
        score = tl.load(scores + own * CHUNK * CHUNK + lane[:, None] * CHUNK + lane[None, :])
        to = changes + own * CHUNK * VALUE_DIM + column[:, None] * CHUNK + lane[None, :]
        change = tl.load(to, mask=in_value, other=0.0).to(tl.float32)
        if BY_CHANNEL:
            last = tl.load(decays + own * KEY_DIM + row, mask=row < KEY_DIM, other=0.0)[None, :]
        else:
            scale = scales + own * (5 * CHUNK) + lane
            reach, fade, unit = (tl.load(scale), tl.load(scale + CHUNK), tl.load(scale + 2 * CHUNK))
            last = tl.load(decays + own)
        before = state.to(kind)
        change -= tl.dot(before, tl.trans(read), input_precision=PRECISION)
        found = tl.dot(before, tl.trans(query), input_precision=PRECISION)
        taken = change
        if not BY_CHANNEL:
            found *= reach[None, :]
            if kind == tl.float16:
                key = (key.to(tl.float32) * unit[:, None]).to(kind)
                taken *= fade[None, :]
            else:
                taken *= (fade * unit)[None, :]
        state *= last
        found = tl.dot(change.to(kind), tl.trans(score), found, input_precision=PRECISION)
        to = out + (token.to(tl.int64) * NUM_VALUES + head)[None, :] * VALUE_DIM + column[:, None]
        tl.store(to, found.to(kind), mask=tl.trans(inside) & in_value)
        state = tl.dot(taken.to(kind), key, state, input_precision=PRECISION)
        tile += 1
    tl.store(place, state, mask=in_key & in_value)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Holds what is known of all chunks before the walk.

    Attributes:
        changes: U turned: [chunks, Hv, V, CHUNK].
        reads: W [chunks, Hv, CHUNK, K]; with a decay for each channel W, Q and K side by side.
        scores: P [chunks, Hv, CHUNK, CHUNK].
        scales: By what rows of (o, D, keys) are multiplied where Q and K are those of the input:
            the first three of [chunks, Hv, 5, CHUNK] float32; None with a decay for each channel.
        decays: Of whole chunks: [chunks, Hv] or [chunks, Hv, K] float32.
    """

    changes: Tensor
    reads: Tensor
    scores: Tensor
    scales: Tensor | None
    decays: Tensor


def walk_chunks(
    chunks: Chunks,
    mixed: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    tuning: DeltaTuning | None = None,
) -> None:
    """Computes `states` and rows of `out` [T, Hv, V] of the requests behind the decodes.

    Args:
        mixed: Queries, keys and values, [T, channels].
        tuning: None: the choice for all shapes.
    """
    _, num_values, key_dim, value_dim = states.shape
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    block_key = max(16, triton.next_power_of_2(key_dim))
    tuning = tuning or walk_tuning(mixed.device, mixed.element_size(), block_key)
    values = min(tuning.values, max(16, triton.next_power_of_2(value_dim)))
    chunk_walk_kernel[(triton.cdiv(value_dim, values), num_values, num_reqs - first_req)](
        mixed,
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        chunks.changes,
        chunks.reads,
        chunks.scores,
        chunks.scales,
        chunks.decays,
        out,
        first_req,
        mixed.stride(0),
        states.stride(0),
        NUM_KEYS=(mixed.shape[1] - num_values * value_dim) // (2 * key_dim),
        NUM_VALUES=num_values,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=block_key,
        VALUES=values,
        CHUNK=CHUNK,
        BY_CHANNEL=chunks.scales is None,
        PRECISION=precision_of(mixed),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
