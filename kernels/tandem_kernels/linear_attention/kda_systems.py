"""The systems of Kimi Delta Attention's chunks: what A and P of `kda_chunks` have between parts of
16 tokens, and T."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.linear_attention.chunk_systems import chunk_of, solve_stored
from tandem_kernels.linear_attention.delta_gates import rate_of


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_system_kernel(
    gates: tl.tensor,
    query_start_loc: tl.tensor,
    scratch: tl.tensor,
    scores: tl.tensor,
    factors: tl.tensor,
    totals: tl.tensor,
    solved: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    gates_stride: tl.tensor,
    rate_scale: tl.tensor,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes P between parts, and T, [chunks, Hv, CHUNK, CHUNK], of chunk i and value head h in
    program (h, i)."""
    tl.static_assert(CHUNK == 4 * PART)
    head, tile = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    kind = factors.dtype.element_ty
    own = tile.to(tl.int64) * NUM_VALUES + head
    lane = tl.arange(0, CHUNK)
    row, column = lane[:, None], lane[None, :]
    part = lane // PART
    is_near = (part[:, None] ^ part[None, :] == 1) & (row > column)
    is_far = row // (2 * PART) > column // (2 * PART)
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    score = tl.zeros([CHUNK, CHUNK], tl.float32)
    for place in tl.range(0, KEY_DIM, CHANNELS, num_stages=1):
        channel = place + tl.arange(0, CHANNELS)
        is_real = channel < KEY_DIM
        of = factors + (own * CHUNK + lane)[:, None] * (3 * KEY_DIM) + channel[None, :]
        key = tl.load(of, mask=is_real[None, :], other=0.0)
        query = tl.load(of + KEY_DIM, mask=is_real[None, :], other=0.0)
        shrunk = tl.load(of + 2 * KEY_DIM, mask=is_real[None, :], other=0.0)
        of = totals + own * (4 * KEY_DIM) + channel
        second = tl.load(of + KEY_DIM, mask=is_real, other=0.0)[None, :]
        third = tl.load(of + 2 * KEY_DIM, mask=is_real, other=0.0)[None, :]
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
    token = first + lane
    inside = token < stop
    rate = tl.load(gates + token.to(tl.int64) * gates_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, rate_of(rate.to(tl.float32), rate_scale), 0.0)
    own *= CHUNK * CHUNK
    to = own + row * CHUNK + column
    tl.store(scores + to, score.to(kind), mask=part[:, None] != part[None, :])
    system *= rate[:, None]
    solution = solve_stored(system, scratch + own, kind, CHUNK, PART, WIDTH)
    tl.store(solved + to, solution.to(kind))
