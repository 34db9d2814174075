"""Streams of many tokens take in what a block gives, and are multiplied while they are there.

Tensor cores multiply ROWS tokens at once by all weights, so a weight is read once for them. Each is
two numbers of the streams' type, the second what the first leaves out: 16 bits of it are left, or
22 of halves, where tf32 would have 11. Products are exact, and sums in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _four(place: tl.tensor, step: tl.tensor, mask: tl.tensor) -> tl.tuple:
    """Loads four tensors that lie `step` numbers apart, in float32."""
    return (
        tl.load(place, mask=mask, other=0.0).to(tl.float32),
        tl.load(place + step, mask=mask, other=0.0).to(tl.float32),
        tl.load(place + 2 * step, mask=mask, other=0.0).to(tl.float32),
        tl.load(place + 3 * step, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def _mixed(own: tl.tuple, by: tl.tuple, share: tl.tensor, given: tl.tensor) -> tl.tensor:
    """Returns one stream of what four were, [ROWS, COLUMNS]."""
    wide = share[:, None] * given + by[0][:, None] * own[0]
    wide += by[1][:, None] * own[1]
    wide += by[2][:, None] * own[2]
    return wide + by[3][:, None] * own[3]


@triton.jit
def _computed_once(numbers: tl.tensor) -> tl.tensor:
    """Returns numbers of 16 bits as they are. What products read of them comes by shared memory:
    the compiler would compute them again as products read them, which several warps do."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [numbers], numbers.dtype, is_pure=False, pack=2
    )


@triton.jit
def _multiplied(
    found: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    acc: tl.tensor,
    total: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Adds products of a stream with its weights at `place`, and of it with itself."""
    weight = tl.load(place, mask=mask, other=0.0)
    first = weight.to(found.dtype)
    acc = tl.dot(first, tl.trans(found), acc, input_precision=PRECISION)
    if found.dtype != tl.float32:
        second = (weight - first.to(tl.float32)).to(found.dtype)
        acc = tl.dot(second, tl.trans(found), acc)
    wide = found.to(tl.float32)
    return acc, total + tl.sum(wide * wide, axis=1)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def mix_many_kernel(
    streams: tl.tensor,
    x: tl.tensor,
    beside: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    fn: tl.tensor,
    logits: tl.tensor,
    squares: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    beside_stride: tl.tensor,
    splits: tl.tensor,
    OUTPUTS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIXES: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> None:
    """Mixes, in program (i, s), part s of the columns of ROWS tokens of four streams, where they
    are, and multiplies them.

    With 64 rows of weights four warps would multiply together, where the compiler overwrites what
    they still read (`warpgroup_waits`).
    """
    tl.static_assert(LANES < 64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    output = tl.arange(0, LANES)
    lane = tl.arange(0, COLUMNS)
    real, used = token < num_tokens, (output < OUTPUTS)[:, None]
    at = token.to(tl.int64)
    kind = streams.dtype.element_ty
    if MIXES:
        shares = _four(post + at * 4, 1, real)
        by0, by1 = _four(comb + at * 16, 4, real), _four(comb + at * 16 + 1, 4, real)
        by2, by3 = _four(comb + at * 16 + 2, 4, real), _four(comb + at * 16 + 3, 4, real)
    acc = tl.zeros([LANES, ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    part = tl.cdiv(tl.cdiv(width, COLUMNS), splits) * COLUMNS
    for start in range(split * part, tl.minimum((split + 1) * part, width), COLUMNS):
        column = start + lane
        inside = (column < width)[None, :]
        mask = real[:, None] & inside
        place = streams + at[:, None] * (4 * width) + column[None, :]
        own = _four(place, width, mask)
        if MIXES:
            of_x = x + at[:, None] * x_stride + column[None, :]
            given = tl.load(of_x, mask=mask, other=0.0).to(tl.float32)
            if HAS_BESIDE:
                of_x = beside + at[:, None] * beside_stride + column[None, :]
                given += tl.load(of_x, mask=mask, other=0.0).to(tl.float32)
                given = given.to(kind).to(tl.float32)
            own = (
                _mixed(own, by0, shares[0], given),
                _mixed(own, by1, shares[1], given),
                _mixed(own, by2, shares[2], given),
                _mixed(own, by3, shares[3], given),
            )
        weights = fn + output[:, None] * (4 * width) + column[None, :]
        for i in tl.static_range(4):
            found = own[i].to(kind)
            if IN_PAIRS:
                found = _computed_once(found)
            if MIXES:
                tl.store(place + i * width, found, mask=mask)
            acc, total = _multiplied(
                found, weights + i * width, used & inside, acc, total, PRECISION
            )
    to = (split * num_tokens + token).to(tl.int64)
    place = logits + to[None, :] * OUTPUTS + output[:, None]
    tl.store(place, acc, mask=real[None, :] & used)
    tl.store(squares + to, total, mask=real)
