"""State-space layers of Mamba 2 for prompts, in chunks of tokens.

With the decay G_i since a chunk's beginning (a logarithm) and S the state before the chunk:

    y_i = exp(G_i) S^T C_i + sum over j <= i of exp(G_i - G_j) (C_i . B_j) dt_j x_j + skip x_i
    S <- exp(G_last) S + sum over j of exp(G_last - G_j) B_j (dt_j x_j)^T

One kernel computes what each chunk adds to the state, all at once; one adds these up, chunk after
chunk, and leaves the state before each; one computes y, again all at once, for several heads that
share B and C. Source: Dao and Gu, Transformers are SSMs, 2024 (its block decomposition).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.prefill_attention import request_of
from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.mamba_steps import decay_and_step
from tandem_kernels.linear_attention.mamba_tuning import ChunkTuning, chunk_tuning
from tandem_kernels.product_precision import precision_of

ELEMENTS = 512
"""Numbers of a state that one program adds up."""


@triton.jit
def _chunk_of(
    query_start_loc: tl.tensor, first_req: tl.tensor, num_reqs: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Returns (first token of this program's chunk, behind the last of its request)."""
    tile = tl.program_id(0)
    r = request_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    first = start + (tile - (start - first_req) // CHUNK - (r - first_req)) * CHUNK
    # Decodes of several tokens leave tiles in front of the first prompt's.
    return tl.where(first < start, stop, first), stop


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def mamba_piece_kernel(
    mixed: tl.tensor,
    steps: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    pieces: tl.tensor,
    decays: tl.tensor,
    sizes: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    steps_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (i, h), what chunk i adds to the state of head h, and of its tokens the
    decay since the chunk's beginning and dt."""
    first, stop = _chunk_of(query_start_loc, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    head = tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    token = first + lane
    inside = token < stop
    row, column = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_DIM)
    in_row, in_column = row < SIZE, column < HEAD_DIM
    # Behind the last token nothing decays and nothing is taken in.
    own = steps + tl.where(inside, token, 0).to(tl.int64) * steps_stride
    log_decay, dt = decay_and_step(own, a_log, dt_bias, head)
    summed, dt = tl.cumsum(tl.where(inside, log_decay, 0.0), axis=0), tl.where(inside, dt, 0.0)
    number = tl.program_id(0).to(tl.int64) * NUM_HEADS + head
    tl.store(decays + number * CHUNK + lane, summed)
    tl.store(sizes + number * CHUNK + lane, dt)
    last = tl.min(summed, axis=0)
    line = mixed + token.to(tl.int64)[:, None] * mixed_stride
    group = head // (NUM_HEADS // NUM_GROUPS)
    keys = line + NUM_HEADS * HEAD_DIM + group * SIZE + row[None, :]
    key = tl.load(keys, mask=inside[:, None] & in_row[None, :], other=0.0)
    values = line + head * HEAD_DIM + column[None, :]
    value = tl.load(values, mask=inside[:, None] & in_column[None, :], other=0.0)
    weighted = value.to(tl.float32) * (dt * tl.exp(last - summed))[:, None]
    piece = tl.dot(tl.trans(key), weighted.to(key.dtype), input_precision=PRECISION)
    to = pieces + number * (SIZE * HEAD_DIM) + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(to, piece, mask=in_row[:, None] & in_column[None, :])


@triton.jit(do_not_specialize=["first_req"])
def mamba_pass_kernel(
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    pieces: tl.tensor,
    decays: tl.tensor,
    befores: tl.tensor,
    first_req: tl.tensor,
    state_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    """Adds up, in program (r, h, j), what the chunks of request first_req + r add to numbers
    j * ELEMENTS and on of the state of head h."""
    r = tl.program_id(0) + first_req
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + r)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    if (seq_len == 0) | (start == stop):
        return
    element = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = element < NUMBERS
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * NUMBERS
    place = states + place + element
    state = tl.load(place, mask=inside & (seq_len > stop - start), other=0.0)
    number = ((start - first_req) // CHUNK + r - first_req).to(tl.int64) * NUM_HEADS + head
    piece = tl.load(pieces + number * NUMBERS + element, mask=inside, other=0.0)
    decay = tl.load(decays + number * CHUNK + CHUNK - 1)
    for first in range(start, stop, CHUNK):
        own = befores + number * NUMBERS + element
        number += NUM_HEADS
        # What the next chunk adds is under way while this one's is added.
        more = first + CHUNK < stop
        following = tl.load(pieces + number * NUMBERS + element, mask=inside & more, other=0.0)
        following_decay = tl.load(decays + number * CHUNK + CHUNK - 1, mask=more, other=0.0)
        tl.store(own, state.to(befores.dtype.element_ty), mask=inside)
        state = state * tl.exp(decay) + piece
        piece, decay = following, following_decay
    tl.store(place, state, mask=inside)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def mamba_chunk_kernel(
    mixed: tl.tensor,
    skip: tl.tensor,
    query_start_loc: tl.tensor,
    befores: tl.tensor,
    decays: tl.tensor,
    sizes: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    mixed_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (i, j, k), what the tokens of half k of chunk i read in heads j * HEADS
    and on."""
    first, stop = _chunk_of(query_start_loc, first_req, num_reqs, CHUNK)
    HALF: tl.constexpr = CHUNK // 2
    half = tl.program_id(2)
    lane = tl.arange(0, HALF)
    own, earlier = half * HALF + lane, lane
    if first + half * HALF >= stop:
        return
    inside = first + own < stop
    row, column = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_DIM)
    in_row, in_column = row < SIZE, column < HEAD_DIM
    line = mixed + (first + own).to(tl.int64)[:, None] * mixed_stride
    earlier_line = mixed + (first + earlier).to(tl.int64)[:, None] * mixed_stride
    first_head = tl.program_id(1) * HEADS
    group = first_head // (NUM_HEADS // NUM_GROUPS)
    keys = NUM_HEADS * HEAD_DIM + group * SIZE + row[None, :]
    real = inside[:, None] & in_row[None, :]
    key = tl.load(line + keys, mask=real, other=0.0)
    query = tl.trans(tl.load(line + keys + NUM_GROUPS * SIZE, mask=real, other=0.0))
    # By the token that is read, then by the one that reads. In front of the second half is the
    # whole first one.
    likeness = tl.dot(key, query, input_precision=PRECISION)
    earlier_key = tl.load(earlier_line + keys, mask=in_row[None, :] & (half > 0), other=0.0)
    earlier_likeness = tl.dot(earlier_key, query, input_precision=PRECISION)
    seen = lane[:, None] <= lane[None, :]
    is_own = lane[:, None] == lane[None, :]
    in_out = in_column[:, None] & inside[None, :]
    kind = mixed.dtype.element_ty
    for head in range(first_head, first_head + HEADS):
        number = tl.program_id(0).to(tl.int64) * NUM_HEADS + head
        until = tl.load(decays + number * CHUNK + own)
        dt = tl.load(sizes + number * CHUNK + own)
        place = befores + number * (SIZE * HEAD_DIM) + row[:, None] * HEAD_DIM + column[None, :]
        before = tl.load(place, mask=in_row[:, None] & in_column[None, :], other=0.0)
        read = tl.dot(tl.trans(before), query, input_precision=PRECISION)
        read *= tl.exp(until)[None, :]
        decay = tl.exp(tl.where(seen, until[None, :] - until[:, None], 0.0))
        scores = tl.where(seen, likeness * decay * dt[:, None], 0.0)
        scores += tl.where(is_own, tl.load(skip + head), 0.0)
        values = head * HEAD_DIM + column[None, :]
        value = tl.load(line + values, mask=inside[:, None] & in_column[None, :], other=0.0)
        read = tl.dot(tl.trans(value), scores.to(kind), read, input_precision=PRECISION)
        if half > 0:
            since = tl.load(decays + number * CHUNK + earlier)
            dt = tl.load(sizes + number * CHUNK + earlier)
            scores = earlier_likeness * tl.exp(until[None, :] - since[:, None]) * dt[:, None]
            value = tl.load(earlier_line + values, mask=in_column[None, :], other=0.0)
            read = tl.dot(tl.trans(value), scores.to(kind), read, input_precision=PRECISION)
        token = (first + own).to(tl.int64)
        to = out + (token * NUM_HEADS + head)[None, :] * HEAD_DIM + column[:, None]
        tl.store(to, read.to(kind), mask=in_out)


def mamba_chunks(
    mixed: Tensor,
    steps: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
) -> None:
    """Computes the requests of `metadata` behind those of one token; arguments as those of
    `reference.mamba.mamba_scan`.

    Args:
        numbers: a_log, dt_bias and skip.
        out: [T, H, P]; rows of these requests are written.
    """
    a_log, dt_bias, skip = numbers
    tuning = chunk_tuning(mixed.device)
    _, num_heads, size, head_dim = states.shape
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    most = triton.cdiv(mixed.shape[0] - first_req, tuning.chunk) + num_reqs - first_req
    pieces = states.new_empty((most, num_heads, size, head_dim))
    befores = mixed.new_empty((most, num_heads, size, head_dim))
    decays, sizes = (states.new_empty((most, num_heads, tuning.chunk)) for _ in range(2))
    lengths, kept = metadata.query_start_loc, (decays, sizes)
    after = first_req, num_reqs, mixed.stride(0)
    given = mixed, steps, a_log, dt_bias, lengths
    shape = _shape(mixed, states, tuning)
    mamba_piece_kernel[(most, num_heads)](
        *given,
        pieces,
        *kept,
        *after,
        steps.stride(0),
        num_warps=tuning.piece_warps,
        **shape,
    )
    of_state = size * head_dim
    mamba_pass_kernel[(num_reqs - first_req, num_heads, triton.cdiv(of_state, ELEMENTS))](
        states,
        metadata.blocks,
        lengths,
        metadata.seq_lens,
        pieces,
        decays,
        befores,
        first_req,
        states.stride(0),
        NUM_HEADS=num_heads,
        NUMBERS=of_state,
        CHUNK=tuning.chunk,
        ELEMENTS=ELEMENTS,
        num_warps=4,
    )
    heads = heads_at_once(num_heads // shape["NUM_GROUPS"], tuning.heads)
    mamba_chunk_kernel[(most, num_heads // heads, 2)](
        *(mixed, skip, lengths, befores),
        *(*kept, out),
        *after,
        HEADS=heads,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **shape,
    )


def _shape(mixed: Tensor, states: Tensor, tuning: ChunkTuning) -> dict[str, Any]:
    """Returns what kernels are compiled for."""
    _, num_heads, size, head_dim = states.shape
    return {
        "NUM_HEADS": num_heads,
        "NUM_GROUPS": (mixed.shape[1] - num_heads * head_dim) // (2 * size),
        "SIZE": size,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": max(16, triton.next_power_of_2(size)),
        "BLOCK_DIM": max(16, triton.next_power_of_2(head_dim)),
        "CHUNK": tuning.chunk,
        "PRECISION": precision_of(mixed),
    }


def heads_at_once(per_group: int, most: int) -> int:
    """Returns how many heads one program computes, of those that share B and C."""
    return next(count for count in range(min(most, per_group), 0, -1) if per_group % count == 0)
