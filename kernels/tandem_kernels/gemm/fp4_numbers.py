"""Four-bit floats become half precision in registers; `fp4_tiles` says where they lie.

The sixteen numbers of two words are eight registers of two bf16 by sixteen operations, and their
scale is one multiplication each: one and a half operations a number. More than three would keep
memory waiting, and on a GPU that computes much each costs power. Of few rows, where there are as
many weights as products, even that multiplication is spared: see `late`.

In NVFP4 a word of scales has those of both sides and of both 16 inputs, and becomes their factors
by three operations: the two of a side lie in the halves of one register, of which an instruction
may multiply two numbers by either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import triton
import triton.language as tl

from tandem_kernels.gemm.fp4_tiles import (
    LAST_SHIFTS,
    LEFT,
    MOVED,
    NVFP4_ADDED,
    NVFP4_TILE_WORDS,
    PLACES,
    SCALES_ROTATED,
    SHIFTS,
)
from tandem_kernels.warpgroup_waits import after_products


def _mask(bits: Iterable[int]) -> int:
    """Returns a word that has these bits in both halves."""
    return sum(0x00010001 << bit for bit in bits)


NUMBER_BITS = _mask(PLACES)
_SCALE_BYTES = 0x0FF00FF0
FIRST_BITS = _mask(LEFT)
_FIRST, _SECOND = (tl.constexpr(_mask(bit + moved for bit in LEFT)) for moved in (0, MOVED))
"""A word of both has these bits of the two words, the second one's `MOVED` further."""


def pairs_of(word: str, both: str, last: int) -> list[tuple[str, int]]:
    """Returns where the four pairs of a word are: in which register, turned by how many bits.
    `last`: Of the fourth, which is in `both`."""
    return [*((word, shift) for shift in SHIFTS), (both, last)]


def pair_lines(given: str, shift: int, to: str) -> list[str]:
    """Returns instructions that bring a pair from register `given` to register `to`, by way of
    `t`."""
    lines = []
    if 0 < shift <= min(PLACES):
        # Nothing comes from the other end.
        lines.append(f"shl.b32 t, {given}, {shift};")
    elif shift:
        lines.append(f"shf.l.wrap.b32 t, {given}, {given}, {shift};")
    return [*lines, f"and.b32 {to}, {'t' if shift else given}, {NUMBER_BITS:#x};"]


def _unpacked(factors: Sequence[Sequence[str]] = (), first: Sequence[str] = ()) -> tl.constexpr:
    """Returns the instructions that make sixteen bf16 of two words ($16, $17).

    Args:
        factors: Registers of each word's factors, for its pairs in their order; none: it has none.
        first: Instructions that fill these registers.
    """
    lines = ["{ .reg .b32 none, both, t, p; mov.b32 none, 0x80008000;", *first]
    # (first & mask) | (second << MOVED & ~mask): what else it has is not read.
    lines.append(f"shl.b32 t, $17, {MOVED}; lop3.b32 both, $16, t, {_FIRST.value:#x}, 0xE4;")
    for word, last in enumerate(LAST_SHIFTS):
        pairs = pairs_of(f"${16 + word}", "both", last)
        for pair, (given, shift) in enumerate(pairs):
            lines += pair_lines(given, shift, "p")
            if factors:
                factor = factors[word][pair * len(factors[word]) // len(pairs)]
                lines.append(f"fma.rn.bf16x2 p, p, {factor}, none;")
            place = 8 * word + 2 * pair
            lines.append(f"mov.b32 {{${place}, ${place + 1}}}, p;")
    return tl.constexpr(" ".join([*lines, "}"]))


def _nvfp4_unpacked() -> tl.constexpr:
    """Returns the instructions that make sixteen bf16 of two words, scaled by the four bytes of a
    third ($18): both words' of the first 16 inputs, then of the others."""
    names = [[f"f{word}{half}" for half in (0, 1)] for word in (0, 1)]
    added = NVFP4_ADDED << 7 | NVFP4_ADDED << 23
    lines = [
        f".reg .b32 {', '.join(names[0] + names[1])}; .reg .b16 first, second;",
        # A word's two bytes are in place, or are rotated there; all factors have the other bits.
        "mov.b32 t, $18;",
    ]
    for word in (0, 1):
        if word:
            lines.append("shf.r.wrap.b32 t, t, t, 8;")
        lines.append(f"lop3.b32 p, t, {_SCALE_BYTES:#x}, {added:#x}, 0xEA;")
        lines.append("mov.b32 {first, second}, p;")
        lines.append(f"mov.b32 {names[word][0]}, {{first, first}};")
        lines.append(f"mov.b32 {names[word][1]}, {{second, second}};")
    return _unpacked(names, lines)


UNPACKED, _TINY, _NVFP4 = _unpacked((["$18"], ["$19"])), _unpacked(), _nvfp4_unpacked()
_OUT = ",".join(["=h"] * 16)
UNPACKED_REGISTERS, _TINY_REGISTERS = tl.constexpr(f"{_OUT},r,r,r,r"), tl.constexpr(f"{_OUT},r,r")
_NVFP4_REGISTERS = tl.constexpr(f"{_OUT},r,r,r")
NVFP4_TILE = tl.constexpr(NVFP4_TILE_WORDS)
_ADDED = tl.constexpr(NVFP4_ADDED << 3)
_SCALES_BACK = tl.constexpr(32 - SCALES_ROTATED)
_SIXTEEN = tl.constexpr((tl.bfloat16,) * 16)
_OWN_SHIFT, _OWN_ROTATION = (tl.constexpr(shift) for shift in SHIFTS[1:])
_LAST_SHIFT, _LAST_ROTATION = (tl.constexpr(shift) for shift in LAST_SHIFTS)
_MOVED = tl.constexpr(MOVED)
_UPPER_NUMBER = tl.constexpr((NUMBER_BITS & 0xFFFF0000) - 2**32)
"""As int32."""


@triton.jit
def _rotated(word: tl.tensor, LEFT: tl.constexpr) -> tl.tensor:
    """Rotates words by LEFT bits."""
    word = word.to(tl.uint32, bitcast=True)
    return ((word << LEFT) | (word >> (32 - LEFT))).to(tl.int32, bitcast=True)


@triton.jit
def _tiny_number(
    own: tl.tensor, both: tl.tensor, LAST: tl.constexpr, INDEX: tl.constexpr
) -> tl.tensor:
    """Returns number INDEX of each word times 2 ** -126, in float32. LAST: by how many bits the
    word of both is rotated for its fourth pair."""
    if INDEX // 2 == 0:
        bits = own
    elif INDEX // 2 == 1:
        bits = own << _OWN_SHIFT
    elif INDEX // 2 == 2:
        bits = _rotated(own, _OWN_ROTATION)
    else:
        bits = _rotated(both, LAST)
    if INDEX % 2 == 0:
        bits = bits << 16
    return (bits & _UPPER_NUMBER).to(tl.float32, bitcast=True)


@triton.jit
def _tiny_word(own: tl.tensor, both: tl.tensor, LAST: tl.constexpr) -> tl.tensor:
    """Returns all eight numbers of each word, as `_joined` does, in float32."""
    return _joined(
        _tiny_number(own, both, LAST, 0),
        _tiny_number(own, both, LAST, 1),
        _tiny_number(own, both, LAST, 2),
        _tiny_number(own, both, LAST, 3),
        _tiny_number(own, both, LAST, 4),
        _tiny_number(own, both, LAST, 5),
        _tiny_number(own, both, LAST, 6),
        _tiny_number(own, both, LAST, 7),
    )


@triton.jit
def _tiny_words(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns the numbers of words of both sides, as `_tiny_word` does."""
    both = (first & _FIRST) | ((second << _MOVED) & _SECOND)
    return _tiny_word(first, both, _LAST_SHIFT), _tiny_word(second, both, _LAST_ROTATION)


@triton.jit
def _joined(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor,
    e: tl.tensor, f: tl.tensor, g: tl.tensor, h: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Joins the eight numbers of each word in three dimensions: the number of a pair, and the
    pair's lower and upper bit."""
    low = tl.join(tl.join(a, b), tl.join(c, d))
    high = tl.join(tl.join(e, f), tl.join(g, h))
    return tl.join(low, high)


@triton.jit
def _sides(numbers: tl.tuple) -> tl.tensor:
    """Joins the sixteen numbers of two words, those of a word as `_joined` does."""
    a, b, c, d, e, f, g, h, a2, b2, c2, d2, e2, f2, g2, h2 = numbers
    low = _joined(a, b, c, d, e, f, g, h)
    return tl.join(low, _joined(a2, b2, c2, d2, e2, f2, g2, h2))


@triton.jit
def _factors(powers: tl.tensor) -> tl.tensor:
    """Returns powers' bytes as float32, for the eight numbers of a word."""
    factors = (powers << 23).to(tl.float32, bitcast=True)
    return tl.expand_dims(tl.expand_dims(tl.expand_dims(factors, -1), -1), -1)


@triton.jit
def fp4_numbers(
    first: tl.tensor,
    second: tl.tensor,
    powers: tl.tensor,
    powers2: tl.tensor,
    kind: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Unpacks words of both sides, [..., 4] each, and their powers' bytes -> [..., 4, 2, 2, 2, 2]:
    the last dimensions are the number of a pair, the pair's lower and upper bit, and the side.

    IN_PAIRS: in bf16, two at once.
    """
    if IN_PAIRS:
        numbers = tl.inline_asm_elementwise(
            UNPACKED,
            UNPACKED_REGISTERS,
            [first, second, powers * 0x00800080, powers2 * 0x00800080],
            _SIXTEEN,
            True,
            1,
        )
        return _sides(numbers)
    low, high = _tiny_words(first, second)
    return tl.join((low * _factors(powers)).to(kind), (high * _factors(powers2)).to(kind))


@triton.jit
def _nvfp4_factors(scales: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Returns the factors of a side as float32, for the eight numbers of a word: [..., 1, 1, 2]."""
    scales = _rotated(scales, _SCALES_BACK)
    first = (scales >> (8 * SIDE)) & 255
    second = (scales >> (8 * SIDE + 16)) & 255
    factors = ((tl.join(first, second) + _ADDED) << 20).to(tl.float32, bitcast=True)
    return tl.expand_dims(tl.expand_dims(factors, -2), -2)


@triton.jit
def nvfp4_numbers(
    first: tl.tensor,
    second: tl.tensor,
    scales: tl.tensor,
    kind: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Unpacks words of both sides as `fp4_numbers` does, by a word of scales. Numbers are
    multiplied by 2 ** -7, exactly."""
    if IN_PAIRS:
        numbers = tl.inline_asm_elementwise(
            _NVFP4, _NVFP4_REGISTERS, [first, second, scales], _SIXTEEN, True, 1
        )
        return _sides(numbers)
    low, high = _tiny_words(first, second)
    low, high = low * _nvfp4_factors(scales, 0), high * _nvfp4_factors(scales, 1)
    return tl.join(low.to(kind), high.to(kind))


@triton.jit
def tiny_mxfp4_numbers(
    first: tl.tensor, second: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr
) -> tl.tensor:
    """Unpacks words as `fp4_numbers` does, in bf16 or float32, but leaves their exponents out:
    the numbers are multiplied by 2 ** -126, which is how their bits lie. Some are denormal."""
    if IN_PAIRS:
        numbers = tl.inline_asm_elementwise(
            _TINY, _TINY_REGISTERS, [first, second], _SIXTEEN, True, 1
        )
        return _sides(numbers)
    low, high = _tiny_words(first, second)
    return tl.join(low.to(kind), high.to(kind))


@triton.jit
def tile_places(
    tiles: tl.tensor,
    tile_row: tl.tensor,
    num_tile_columns: tl.tensor,
    COLUMN_TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns where the first COLUMN_TILES tiles of rows of tiles, [ROW_TILES], begin: addresses
    [ROW_TILES, COLUMN_TILES, 1]."""
    column = tl.arange(0, COLUMN_TILES)
    tile = tile_row.to(tl.int64)[:, None, None] * num_tile_columns + column[None, :, None]
    return tiles + tile * TILE


@triton.jit
def in_order_of_warps(given: tl.tensor) -> tl.tensor:
    """Orders rows [ROWS, DEPTH] as warps multiply that do so by themselves (BY_WARP below): four
    inputs of a thread lie beside each other, which in a tile are two and two."""
    ROWS: tl.constexpr = given.shape[0]
    DEPTH: tl.constexpr = given.shape[1]
    pieces = given.reshape(ROWS, DEPTH // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
    return pieces.reshape(ROWS, DEPTH)


@triton.jit
def in_place(numbers: tl.tensor, BY_WARP: tl.constexpr) -> tl.tensor:
    """Arranges numbers [ROWS, GROUPS, 4, 2, 2, 2, 2] as weights [2 * ROWS, 32 * GROUPS]; see
    `fp4_numbers` and `fp4_weights`."""
    ROWS: tl.constexpr = numbers.shape[0]
    GROUPS: tl.constexpr = numbers.shape[1]
    numbers = numbers.reshape(ROWS // 8, 8, GROUPS, 4, 2, 2, 2, 2)
    if BY_WARP:
        numbers = numbers.permute(0, 7, 1, 2, 6, 3, 5, 4)
    else:
        numbers = numbers.permute(0, 7, 1, 2, 6, 5, 3, 4)
    return numbers.reshape(2 * ROWS, 32 * GROUPS)


@triton.jit
def fp4_weights(
    places: tl.tensor,
    inside: tl.tensor,
    kind: tl.constexpr,
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Loads tiles of TILE words: a part [64 * ROW_TILES, 64 * COLUMN_TILES] of a weight.

    Args:
        places: As `tile_places` gives them, or this many tiles further.
        inside: [COLUMN_TILES], tiles that there are. EVEN: all.

    BY_WARP: inputs are ordered as one warp multiplies, else as four do together: in each 16 inputs,
    two and two of those that in order lie 8 apart are beside each other. WAITS: see
    `after_products`.
    """
    ROWS: tl.constexpr = 32 * ROW_TILES
    GROUPS: tl.constexpr = 2 * COLUMN_TILES
    lane = tl.arange(0, 256)[None, None, :]
    scale_lane = 512 + tl.arange(0, TILE - 512)[None, None, :]
    if EVEN:
        first, second = tl.load(places + lane), tl.load(places + 256 + lane)
        scales = tl.load(places + scale_lane)
    else:
        first = tl.load(places + lane, mask=inside[None, :, None], other=0)
        second = tl.load(places + 256 + lane, mask=inside[None, :, None], other=0)
        scales = tl.load(places + scale_lane, mask=inside[None, :, None], other=0)
    if WAITS:
        first, second = after_products(first, second)
    first = first.reshape(ROW_TILES, COLUMN_TILES, 4, 8, 4, 2).permute(0, 2, 3, 1, 5, 4)
    second = second.reshape(ROW_TILES, COLUMN_TILES, 4, 8, 4, 2).permute(0, 2, 3, 1, 5, 4)
    first, second = first.reshape(ROWS, GROUPS, 4), second.reshape(ROWS, GROUPS, 4)
    if TILE == NVFP4_TILE:
        scales = scales.reshape(ROW_TILES, COLUMN_TILES, 4, 8, 2).permute(0, 2, 3, 1, 4)
        scales = tl.broadcast_to(scales.reshape(ROWS, GROUPS, 1), (ROWS, GROUPS, 4))
        numbers = nvfp4_numbers(first, second, scales, kind, IN_PAIRS)
    else:
        scales = scales.reshape(ROW_TILES, COLUMN_TILES, 4, 8, 1).permute(0, 2, 3, 1, 4)
        # By a reshape, or the compiler moves the numbers through shared memory.
        shift = tl.arange(0, 2).reshape(1, 1, 1, 1, 2) * 16
        powers = ((scales >> shift) & 255).reshape(ROWS, GROUPS, 1)
        powers2 = ((scales >> (shift + 8)) & 255).reshape(ROWS, GROUPS, 1)
        powers = tl.broadcast_to(powers, (ROWS, GROUPS, 4))
        powers2 = tl.broadcast_to(powers2, (ROWS, GROUPS, 4))
        numbers = fp4_numbers(first, second, powers, powers2, kind, IN_PAIRS)
    return in_place(numbers, BY_WARP)
