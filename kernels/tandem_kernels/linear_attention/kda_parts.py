"""Parts of 16 tokens of Kimi Delta Attention's chunks: what A and P of `kda_chunks` have on their
diagonals, and the factors that all else is made of.

With x_t = exp(g_t) of a channel, a segment of n tokens has for each token t

    grown   the product of x from its first token to t       (decays of what comes before it)
    shrunk  the product of x behind t to its last token      (decays of t for what comes after)
    total   the product of all x

and those of two neighbours give those of both together: the second's `grown` times the first's
`total`, the first's `shrunk` times the second's. None exceeds 1, and nothing is ever divided by
one, so that channels which forget at once lose no digit of the others' pairs, or of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.linear_attention.chunk_systems import chunk_of, part_inverses, token_rows
from tandem_kernels.linear_attention.delta_gates import L2_EPS, channel_decays, rate_of

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def part_rows(
    start: tl.tensor, token: tl.tensor, inside: tl.tensor, stride: tl.tensor,
    channel: tl.tensor, DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns some channels of a head's rows, [tokens, channels], zero where there is nothing."""
    place = start + token.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(place, mask=inside[:, None] & (channel < DIM)[None, :], other=0.0)


@triton.jit
def _joined(
    grown: tl.tensor, shrunk: tl.tensor, total: tl.tensor, LENGTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (grown, shrunk) [tokens, channels] and totals [segments, channels] of segments of
    2 LENGTH tokens, given those of LENGTH."""
    TOKENS: tl.constexpr = grown.shape[0]
    CHANNELS: tl.constexpr = grown.shape[1]
    PAIRS: tl.constexpr = TOKENS // (2 * LENGTH)
    is_second = tl.arange(0, 2)[None, :, None] == 1
    pair = tl.reshape(total, [PAIRS, 2, CHANNELS])
    first = tl.sum(tl.where(is_second, 0.0, pair), axis=1)
    second = tl.sum(tl.where(is_second, pair, 0.0), axis=1)
    is_behind = tl.arange(0, 2 * LENGTH)[None, :, None] >= LENGTH
    grown = tl.reshape(grown, [PAIRS, 2 * LENGTH, CHANNELS])
    grown *= tl.where(is_behind, first[:, None, :], 1.0)
    shrunk = tl.reshape(shrunk, [PAIRS, 2 * LENGTH, CHANNELS])
    shrunk *= tl.where(is_behind, 1.0, second[:, None, :])
    shape: tl.constexpr = [TOKENS, CHANNELS]
    return tl.reshape(grown, shape), tl.reshape(shrunk, shape), first * second


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_parts_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    decays: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    inverses: tl.tensor,
    scores: tl.tensor,
    factors: tl.tensor,
    totals: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    gates_stride: tl.tensor,
    scale: tl.tensor,
    rate_scale: tl.tensor,
    MIXED_STRIDE: tl.constexpr,
    DECAYS_STRIDE: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes, in program (CHUNK // PART * h + p, i), the blocks of T and P of part p of chunk i
    and value head h; k grown, q grown and k shrunk in its part, side by side, [chunks, Hv, CHUNK,
    3 K], and totals [chunks, Hv, parts, K]."""
    tl.static_assert(PART == 16)  # Two tokens differ in one of four bits first.
    PER_THREAD: tl.constexpr = (CHANNELS + 31) // 32
    PARTS: tl.constexpr = CHUNK // PART
    tile = tl.program_id(1)
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    kind = mixed.dtype.element_ty
    lane = tl.arange(0, PART)
    row, column = lane[:, None], lane[None, :]
    differing = tl.where(row > column, row ^ column, 0)
    first += part * PART
    inside = first + lane < stop
    mixed += first.to(tl.int64) * MIXED_STRIDE
    decays += first.to(tl.int64) * DECAYS_STRIDE + head * KEY_DIM
    queries = mixed + head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    keys = queries + NUM_KEYS * KEY_DIM
    whole = token_rows(queries, lane, inside, MIXED_STRIDE, KEY_DIM, BLOCK_KEY).to(tl.float32)
    other = token_rows(keys, lane, inside, MIXED_STRIDE, KEY_DIM, BLOCK_KEY).to(tl.float32)
    query_scale = scale * tl.rsqrt(tl.sum(whole * whole, axis=1) + L2_EPS)
    key_scale = tl.rsqrt(tl.sum(other * other, axis=1) + L2_EPS)
    score = tl.where(row == column, tl.sum(whole * other, axis=1)[:, None], 0.0)
    system = tl.zeros([PART, PART], tl.float32)
    own = tile.to(tl.int64) * NUM_VALUES + head
    line = own * CHUNK + part * PART + lane
    for place in tl.range(0, KEY_DIM, CHANNELS, num_stages=1):
        # Said to be neighbours in these alone, a warp's threads have all tokens of their channels.
        channel = tl.max_contiguous(place + tl.arange(0, CHANNELS), PER_THREAD)
        real = (channel < KEY_DIM)[None, :]
        decay = channel_decays(
            decays, DECAYS_STRIDE, a_log + head, dt_bias + head * KEY_DIM,
            lane, inside, channel, KEY_DIM, FLOOR,
        )  # fmt: skip
        if kind == tl.float32:
            decay = decay.to(tl.float64)
        total = tl.exp2(decay * _LOG2E)
        grown, shrunk = total, tl.full([PART, CHANNELS], 1.0, total.dtype)
        query = part_rows(queries, lane, inside, MIXED_STRIDE, channel, KEY_DIM).to(tl.float32)
        key = part_rows(keys, lane, inside, MIXED_STRIDE, channel, KEY_DIM).to(tl.float32)
        for level in tl.static_range(4):
            is_second = (row >> level & 1) == 1
            left = (key * tl.where(is_second, grown, shrunk).to(tl.float32)).to(kind)
            right = tl.trans(left)
            is_level = differing >> level == 1
            found = tl.dot(left, right, input_precision=PRECISION)
            system += tl.where(is_level, found, 0.0)
            left = tl.where(is_second, query * grown.to(tl.float32), 0.0).to(kind)
            found = tl.dot(left, right, input_precision=PRECISION)
            score += tl.where(is_level, found, 0.0)
            grown, shrunk, total = _joined(grown, shrunk, total, 1 << level)
        query *= query_scale[:, None]
        key *= key_scale[:, None]
        to = factors + line[:, None] * (3 * KEY_DIM) + channel[None, :]
        tl.store(to, (key * grown.to(tl.float32)).to(kind), mask=real)
        tl.store(to + KEY_DIM, (query * grown.to(tl.float32)).to(kind), mask=real)
        tl.store(to + 2 * KEY_DIM, (key * shrunk.to(tl.float32)).to(kind), mask=real)
        to = totals + (own * PARTS + part) * KEY_DIM + tl.arange(0, 1)[:, None] + channel[None, :]
        tl.store(to, total.to(tl.float32), mask=real)
    gates += (first + lane).to(tl.int64) * gates_stride + head
    rate = tl.load(gates, mask=inside, other=0.0)
    rate = tl.where(inside, rate_of(rate.to(tl.float32), rate_scale), 0.0)
    to = line[:, None] * CHUNK + part * PART + column
    score *= query_scale[:, None] * key_scale[None, :]
    tl.store(scores + to, score.to(kind))
    system *= (rate * key_scale)[:, None] * key_scale[None, :]
    tl.store(inverses + to, system)
    tl.debug_barrier()
    own = inverses + (own * CHUNK + part * PART) * CHUNK + part * PART
    inverse = part_inverses(own, PART, CHUNK, PART, WIDTH)
    tl.debug_barrier()
    column = tl.arange(0, WIDTH)[None, :]
    tl.store(own + row * CHUNK + column, inverse, mask=column < PART)
