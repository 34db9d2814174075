"""The systems of Kimi Delta Attention's chunks: A and P as `kda_chunks` has them, and T."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.linear_attention.chunk_systems import chunk_of, solve
from tandem_kernels.linear_attention.delta_gates import channel_decays, rate_of, unit_scale


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
def summed_decays(
    decays: tl.tensor, stride: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor,
    token: tl.tensor, inside: tl.tensor, channel: tl.tensor,
    DIM: tl.constexpr, FLOOR: tl.constexpr, kind: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns decays of channels summed from the chunk's beginning, [tokens, channels]; so
    precisely that for inputs of `kind` their differences are as good as sums."""
    decay = channel_decays(decays, stride, a_log, dt_bias, token, inside, channel, DIM, FLOOR)
    if kind == tl.float32:
        decay = decay.to(tl.float64)
    return tl.cumsum(decay, axis=0)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def kda_system_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    decays: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_start_loc: tl.tensor,
    scratch: tl.tensor,
    scores: tl.tensor,
    solved: tl.tensor,
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
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes P and T [chunks, Hv, CHUNK, CHUNK] of chunk i and value head h in program (i, h)."""
    tl.static_assert(CHUNK == 64)  # Two tokens differ in one of six bits first.
    tile, head = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    kind = mixed.dtype.element_ty
    lane = tl.arange(0, CHUNK)
    row, column = lane[:, None], lane[None, :]
    differing = tl.where(row > column, row ^ column, 0)
    token = first + lane
    inside = token < stop
    queries = mixed + head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    keys = queries + NUM_KEYS * KEY_DIM
    decays += head * KEY_DIM
    dt_bias += head * KEY_DIM
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    score = tl.zeros([CHUNK, CHUNK], tl.float32)
    own_score = tl.zeros([CHUNK], tl.float32)
    key_size = tl.zeros([CHUNK], tl.float32)
    query_size = tl.zeros([CHUNK], tl.float32)
    for place in tl.range(0, KEY_DIM, CHANNELS, num_stages=1):
        channel = place + tl.arange(0, CHANNELS)
        summed = summed_decays(
            decays, decays_stride, a_log + head, dt_bias, token, inside, channel, KEY_DIM, FLOOR,
            kind,
        )  # fmt: skip
        key = part_rows(keys, token, inside, mixed_stride, channel, KEY_DIM)
        query = part_rows(queries, token, inside, mixed_stride, channel, KEY_DIM)
        own_score += tl.sum(query * key, axis=1)
        key_size += tl.sum(key * key, axis=1)
        query_size += tl.sum(query * query, axis=1)
        for level in tl.range(6, num_stages=1):
            is_level = differing >> level == 1
            border = (lane >> level + 1 << level + 1) + (1 << level) - 1
            border = tl.broadcast_to(border[:, None], [CHUNK, CHANNELS])
            faded = tl.exp(-tl.abs(summed - tl.gather(summed, border, 0)).to(tl.float32))
            left = (key * faded).to(kind)
            right = tl.trans(left)
            found = tl.dot(left, right, input_precision=PRECISION)
            system += tl.where(is_level, found, 0.0)
            found = tl.dot((query * faded).to(kind), right, input_precision=PRECISION)
            score += tl.where(is_level, found, 0.0)
    key_scale = unit_scale(key_size)
    query_scale = scale * unit_scale(query_size)
    rate = tl.load(gates + token.to(tl.int64) * gates_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, rate_of(rate.to(tl.float32), rate_scale), 0.0)
    own = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK * CHUNK
    to = own + row * CHUNK + column
    score = tl.where(row == column, own_score[:, None], score)
    score *= query_scale[:, None] * key_scale[None, :]
    tl.store(scores + to, score.to(kind))
    system *= (rate * key_scale)[:, None] * key_scale[None, :]
    solution = solve(system, scratch + own, kind, CHUNK, PART, WIDTH)
    tl.store(solved + to, solution.to(kind))
