"""The systems of Kimi Delta Attention's chunks, made of parts of 16 tokens (`kda_parts`), and what
is multiplied by their solutions: all of `kda_chunks` that does not wait for a state.

Between parts, A and P are products of rows k grown and q grown with columns k shrunk: of two
neighbours as they are; of the halves of a chunk, those of the fourth part grown by the third's
total, and those of the first shrunk by the second's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.linear_attention.chunk_systems import chunk_of, join_parts
from tandem_kernels.linear_attention.delta_gates import rate_of
from tandem_kernels.linear_attention.kda_parts import part_rows


@triton.jit
def _between_parts(
    factors: tl.tensor,
    totals: tl.tensor,
    KEY_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (A without rates, P) between the parts of a chunk, whose `factors` and `totals` these
    are; zero within parts."""
    kind = factors.dtype.element_ty
    lane = tl.arange(0, CHUNK)
    part = lane // PART
    is_near = (part[:, None] ^ part[None, :] == 1) & (lane[:, None] > lane[None, :])
    is_far = (part[:, None] >= 2) & (part[None, :] < 2)
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    score = tl.zeros([CHUNK, CHUNK], tl.float32)
    for place in tl.range(0, KEY_DIM, CHANNELS, num_stages=1):
        channel = place + tl.arange(0, CHANNELS)
        is_real = channel < KEY_DIM
        of = factors + lane[:, None] * (3 * KEY_DIM) + channel[None, :]
        key = tl.load(of, mask=is_real[None, :], other=0.0)
        query = tl.load(of + KEY_DIM, mask=is_real[None, :], other=0.0)
        shrunk = tl.load(of + 2 * KEY_DIM, mask=is_real[None, :], other=0.0)
        second = tl.load(totals + KEY_DIM + channel, mask=is_real, other=0.0)[None, :]
        third = tl.load(totals + 2 * KEY_DIM + channel, mask=is_real, other=0.0)[None, :]
        right = tl.trans(shrunk)
        found = tl.dot(key, right, input_precision=PRECISION)
        system += tl.where(is_near, found, 0.0)
        found = tl.dot(query, right, input_precision=PRECISION)
        score += tl.where(is_near, found, 0.0)
        shrunk = (shrunk.to(tl.float32) * tl.where(part[:, None] == 0, second, 1.0)).to(kind)
        reach = tl.where(part[:, None] == 3, third, 1.0)
        key = (key.to(tl.float32) * reach).to(kind)
        query = (query.to(tl.float32) * reach).to(kind)
        right = tl.trans(shrunk)
        found = tl.dot(key, right, input_precision=PRECISION)
        system += tl.where(is_far, found, 0.0)
        found = tl.dot(query, right, input_precision=PRECISION)
        score += tl.where(is_far, found, 0.0)
    return system, score


@triton.jit
def _store_reads(
    solution: tl.tensor,
    rate: tl.tensor,
    factors: tl.tensor,
    totals: tl.tensor,
    lasts: tl.tensor,
    channel: tl.tensor,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes channels of W, q exp(G) and k exp(G_last - G) where it finds k grown, q grown and
    k shrunk, and of exp(G_last)."""
    kind = factors.dtype.element_ty
    lane = tl.arange(0, CHUNK)
    is_real = channel < KEY_DIM
    a = tl.load(totals + channel, mask=is_real, other=0.0)
    b = tl.load(totals + KEY_DIM + channel, mask=is_real, other=0.0)
    c = tl.load(totals + 2 * KEY_DIM + channel, mask=is_real, other=0.0)
    d = tl.load(totals + 3 * KEY_DIM + channel, mask=is_real, other=0.0)
    tl.store(lasts + channel, a * b * c * d, mask=is_real)
    part = (lane // PART)[:, None]
    since = tl.where(part == 1, a[None, :], 1.0)
    since = tl.where(part == 2, (a * b)[None, :], since)
    since = tl.where(part == 3, (a * b * c)[None, :], since)
    until = tl.where(part == 2, d[None, :], 1.0)
    until = tl.where(part == 1, (c * d)[None, :], until)
    until = tl.where(part == 0, (b * c * d)[None, :], until)
    real = is_real[None, :]
    to = factors + lane[:, None] * (3 * KEY_DIM) + channel[None, :]
    key = tl.load(to, mask=real, other=0.0).to(tl.float32)
    query = tl.load(to + KEY_DIM, mask=real, other=0.0).to(tl.float32)
    shrunk = tl.load(to + 2 * KEY_DIM, mask=real, other=0.0).to(tl.float32)
    read = tl.dot(solution, (key * since * rate).to(kind), input_precision=PRECISION)
    tl.debug_barrier()
    tl.store(to, read.to(kind), mask=real)
    tl.store(to + KEY_DIM, (query * since).to(kind), mask=real)
    tl.store(to + 2 * KEY_DIM, (shrunk * until).to(kind), mask=real)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_system_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    query_start_loc: tl.tensor,
    inverses: tl.tensor,
    scores: tl.tensor,
    factors: tl.tensor,
    totals: tl.tensor,
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
    """Computes, in program (h, i), of chunk i and value head h: P between parts, U, turned,
    [chunks, Hv, V, CHUNK], exp(G_last), and what `_store_reads` does."""
    tl.static_assert(CHUNK == 4 * PART)
    head, tile = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    kind = mixed.dtype.element_ty
    own = tile.to(tl.int64) * NUM_VALUES + head
    lane = tl.arange(0, CHUNK)
    is_own = lane[:, None] // PART == lane[None, :] // PART
    factors += own * (CHUNK * 3 * KEY_DIM)
    totals += own * (CHUNK // PART * KEY_DIM)
    system, score = _between_parts(factors, totals, KEY_DIM, CHANNELS, CHUNK, PART, PRECISION)
    place = own * CHUNK * CHUNK + lane[:, None] * CHUNK + lane[None, :]
    tl.store(scores + place, score.to(kind), mask=~is_own)
    token = first + lane
    inside = token < stop
    rate = tl.load(gates + token.to(tl.int64) * gates_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, rate_of(rate.to(tl.float32), rate_scale), 0.0)[:, None]
    inverse = tl.load(inverses + place, mask=is_own, other=0.0)
    solution = join_parts(inverse, system * rate, kind, CHUNK, PART).to(kind)

    values = mixed + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    for at in tl.range(0, VALUE_DIM, CHANNELS, num_stages=1):
        channel = at + tl.arange(0, CHANNELS)
        value = part_rows(values, token, inside, mixed_stride, channel, VALUE_DIM)
        value = (value.to(tl.float32) * rate).to(kind)
        change = tl.dot(solution, value, input_precision=PRECISION)
        to = changes + own * CHUNK * VALUE_DIM + channel[None, :] * CHUNK + lane[:, None]
        tl.store(to, change.to(kind), mask=(channel < VALUE_DIM)[None, :])
    for at in tl.range(0, KEY_DIM, CHANNELS, num_stages=1):
        channel = at + tl.arange(0, CHANNELS)
        _store_reads(
            solution, rate, factors, totals, lasts + own * KEY_DIM, channel,
            KEY_DIM, CHUNK, PART, PRECISION,
        )  # fmt: skip
