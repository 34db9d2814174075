"""The systems of Kimi Delta Attention's chunks: A, P and T as `kda_chunks` has them.

A and P are computed in parts of 16 tokens, a program each, with T of the part alone; then T of a
chunk is made of the parts', block by block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.prefill_attention import request_of
from tandem_kernels.linear_attention.delta_chunks import token_rows
from tandem_kernels.linear_attention.delta_gates import L2_EPS, channel_decays, rate_of


@triton.jit
def chunk_of(
    query_start_loc: tl.tensor,
    tile: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Returns the first token of a chunk, and where its request's tokens end."""
    r = request_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    start = tl.load(query_start_loc + r)
    first = start + (tile - (start - first_req) // CHUNK - (r - first_req)) * CHUNK
    return first, tl.load(query_start_loc + r + 1)


@triton.jit
def part_rows(
    start: tl.tensor, token: tl.tensor, inside: tl.tensor, stride: tl.tensor,
    channel: tl.tensor, DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns some channels of a head's rows, [tokens, channels], zero where there is nothing."""
    place = start + token.to(tl.int64)[:, None] * stride + channel[None, :]
    mask = inside[:, None] & (channel < DIM)[None, :]
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def unit_scales(
    start: tl.tensor, token: tl.tensor, inside: tl.tensor, stride: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns by what rows of tokens are multiplied to have unit length."""
    row = token_rows(start, token, inside, stride, DIM, BLOCK).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(row * row, axis=1) + L2_EPS)


@triton.jit
def _part_inverse(lower: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """Returns the inverse of 1 + `lower`, which is strictly lower triangular, [PART, PART]."""
    row, column = tl.arange(0, PART)[:, None], tl.arange(0, PART)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for i in range(1, PART):
        own = tl.sum(tl.where(row == i, -lower, 0.0), axis=0)
        solved = tl.sum(own[:, None] * inverse, axis=0)
        inverse += tl.where(row == i, solved[None, :], 0.0)
    return inverse


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_scores_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    decays: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    lower: tl.tensor,
    scores: tl.tensor,
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
    BLOCK_KEY: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (i, h, p), rows p * PART and on of A and P of chunk i and value head h.
    In the place of the part's own columns of A stands their T. What lies above the diagonal, and
    in parts behind the last token, is left as it was."""
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    begin = first + part * PART
    if begin >= stop:
        return
    kind = mixed.dtype.element_ty
    lane, column = tl.arange(0, PART), tl.arange(0, CHUNK)
    token, other = begin + lane, first + column
    inside, before = token < stop, other < begin
    key_head = head // (NUM_VALUES // NUM_KEYS)
    queries = mixed + key_head * KEY_DIM
    keys = mixed + (NUM_KEYS + key_head) * KEY_DIM
    decays += head * KEY_DIM
    dt_bias += head * KEY_DIM
    query_scale = scale * unit_scales(queries, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    key_scale = unit_scales(keys, token, inside, mixed_stride, KEY_DIM, BLOCK_KEY)
    other_scale = unit_scales(keys, other, before, mixed_stride, KEY_DIM, BLOCK_KEY)

    likeness = tl.zeros([PART, CHUNK], tl.float32)
    seen = tl.zeros([PART, CHUNK], tl.float32)
    own_likeness = tl.zeros([PART, PART], tl.float32)
    own_seen = tl.zeros([PART, PART], tl.float32)
    for place in range(0, KEY_DIM, CHANNELS):
        channel = place + tl.arange(0, CHANNELS)
        decay = channel_decays(
            decays, decays_stride, a_log + head, dt_bias, token, inside, channel, KEY_DIM, FLOOR
        )
        query = part_rows(queries, token, inside, mixed_stride, channel, KEY_DIM)
        query *= query_scale[:, None]
        key = part_rows(keys, token, inside, mixed_stride, channel, KEY_DIM)
        key *= key_scale[:, None]
        if part > 0:
            behind = channel_decays(
                decays, decays_stride, a_log + head, dt_bias,
                other + 1, other + 1 < begin, channel, KEY_DIM, FLOOR,
            )  # fmt: skip
            earlier = part_rows(keys, other, before, mixed_stride, channel, KEY_DIM)
            earlier *= other_scale[:, None]
            earlier *= tl.exp(tl.cumsum(behind, axis=0, reverse=True))
            earlier = tl.trans(earlier.to(kind))
            since = tl.exp(tl.cumsum(decay, axis=0))
            found = (key * since).to(kind)
            likeness = tl.dot(found, earlier, likeness, input_precision=PRECISION)
            found = (query * since).to(kind)
            seen = tl.dot(found, earlier, seen, input_precision=PRECISION)
        # Decays from behind token j to each, as j goes down.
        span = tl.zeros([PART, CHANNELS], tl.float32)
        for i in range(PART):
            j = PART - 1 - i
            chosen, reaches = (lane == j)[:, None], (lane >= j)[:, None]
            of_key = tl.sum(tl.where(chosen, key, 0.0), axis=0)
            of_decay = tl.sum(tl.where(chosen, decay, 0.0), axis=0)
            reach = tl.where(reaches, tl.exp(span), 0.0) * of_key[None, :]
            here = lane[None, :] == j
            own_likeness += tl.where(here, tl.sum(key * reach, axis=1)[:, None], 0.0)
            own_seen += tl.where(here, tl.sum(query * reach, axis=1)[:, None], 0.0)
            span += tl.where(reaches, of_decay[None, :], 0.0)

    rate = tl.load(gates + token.to(tl.int64) * gates_stride + head, mask=inside, other=0.0)
    rate = rate_of(rate.to(tl.float32), rate_scale)
    line = ((tile.to(tl.int64) * NUM_VALUES + head) * CHUNK + part * PART + lane) * CHUNK
    whole = line[:, None] + column[None, :]
    tl.store(lower + whole, likeness * rate[:, None], mask=before[None, :])
    tl.store(scores + whole, seen.to(kind), mask=before[None, :])
    own = line[:, None] + part * PART + lane[None, :]
    below = lane[:, None] > lane[None, :]
    system = tl.where(below, own_likeness * rate[:, None], 0.0)
    tl.store(lower + own, _part_inverse(system, PART))
    tl.store(scores + own, own_seen.to(kind))


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _block(
    start: tl.tensor, i: tl.constexpr, j: tl.constexpr, count: tl.tensor,
    CHUNK: tl.constexpr, PART: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns block (i, j) of a chunk's matrix, zero behind its `count` tokens."""
    lane = tl.arange(0, PART)
    place = (i * PART + lane)[:, None] * CHUNK + j * PART + lane[None, :]
    return tl.load(start + place, mask=i * PART < count, other=0.0)


@triton.jit
def _store_block(
    start: tl.tensor, i: tl.constexpr, j: tl.constexpr, block: tl.tensor,
    CHUNK: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, PART)
    place = (i * PART + lane)[:, None] * CHUNK + j * PART + lane[None, :]
    tl.store(start + place, block.to(start.dtype.element_ty))


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_solve_kernel(
    query_start_loc: tl.tensor,
    lower: tl.tensor,
    solved: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    NUM_VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    SOLVER: tl.constexpr,
) -> None:
    """Computes T of chunk i and value head h in program (i, h): T_ij is what is left of the blocks
    of A between parts j and i, times T_ii, with the other sign."""
    tl.static_assert(CHUNK == 4 * PART)
    tile, head = tl.program_id(0), tl.program_id(1)
    first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    count = stop - first
    place = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK * CHUNK
    start, to = lower + place, solved + place
    t00 = _block(start, 0, 0, count, CHUNK, PART)
    t11 = _block(start, 1, 1, count, CHUNK, PART)
    t22 = _block(start, 2, 2, count, CHUNK, PART)
    t33 = _block(start, 3, 3, count, CHUNK, PART)
    a10 = _block(start, 1, 0, count, CHUNK, PART)
    a20 = _block(start, 2, 0, count, CHUNK, PART)
    a21 = _block(start, 2, 1, count, CHUNK, PART)
    a30 = _block(start, 3, 0, count, CHUNK, PART)
    a31 = _block(start, 3, 1, count, CHUNK, PART)
    a32 = _block(start, 3, 2, count, CHUNK, PART)
    t10 = -_product(t11, _product(a10, t00, SOLVER), SOLVER)
    t21 = -_product(t22, _product(a21, t11, SOLVER), SOLVER)
    t32 = -_product(t33, _product(a32, t22, SOLVER), SOLVER)
    rest = _product(a20, t00, SOLVER) + _product(a21, t10, SOLVER)
    t20 = -_product(t22, rest, SOLVER)
    rest = _product(a31, t11, SOLVER) + _product(a32, t21, SOLVER)
    t31 = -_product(t33, rest, SOLVER)
    rest = _product(a30, t00, SOLVER) + _product(a31, t10, SOLVER) + _product(a32, t20, SOLVER)
    t30 = -_product(t33, rest, SOLVER)
    nothing = tl.zeros([PART, PART], tl.float32)
    _store_block(to, 0, 0, t00, CHUNK, PART)
    _store_block(to, 1, 0, t10, CHUNK, PART)
    _store_block(to, 1, 1, t11, CHUNK, PART)
    _store_block(to, 2, 0, t20, CHUNK, PART)
    _store_block(to, 2, 1, t21, CHUNK, PART)
    _store_block(to, 2, 2, t22, CHUNK, PART)
    _store_block(to, 3, 0, t30, CHUNK, PART)
    _store_block(to, 3, 1, t31, CHUNK, PART)
    _store_block(to, 3, 2, t32, CHUNK, PART)
    _store_block(to, 3, 3, t33, CHUNK, PART)
    for i in tl.static_range(3):
        for j in tl.static_range(i + 1, 4):
            _store_block(to, i, j, nothing, CHUNK, PART)
