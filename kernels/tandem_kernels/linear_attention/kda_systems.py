"""The systems of Kimi Delta Attention's chunks: A and P as `kda_chunks` has them.

They are computed in parts of 16 tokens, a program each, with T of the part alone, for
`chunk_systems.solve_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.linear_attention.chunk_systems import chunk_of, part_inverse, token_rows
from tandem_kernels.linear_attention.delta_gates import L2_EPS, channel_decays, rate_of


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
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
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
    tl.store(lower + own, part_inverse(system, PART))
    tl.store(scores + own, own_seen.to(kind))
