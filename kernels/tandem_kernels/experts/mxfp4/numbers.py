"""MXFP4 numbers become half precision in registers; `tiles` says where they lie.

Eight numbers of a word are four registers of two bf16 by 11 operations, and their exponent is one
multiplication each: less than two operations a number. More than three would keep memory waiting.
Of few rows, where there are as many weights as products, even that multiplication is spared: see
`late`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MASK = "0x81C081C0"


def _unpacked(*, scaled: bool) -> tl.constexpr:
    """Returns the instructions that make eight bf16 of a word ($8), `scaled` by a factor ($9)."""
    lines = ["{ .reg .b32 none, t, p<4>; mov.b32 none, 0x80008000;", f"and.b32 p0, $8, {_MASK};"]
    for pair, shift in ((1, 3), (2, 6)):
        lines.append(f"shl.b32 t, $8, {shift}; and.b32 p{pair}, t, {_MASK};")
    lines.append("shl.b32 t, $8, 1; and.b32 p3, t, 0x80008000;")
    for shift, mask in ((5, "0x01000100"), (4, "0x00C000C0")):
        # p3 | (t & mask)
        lines.append(f"shr.u32 t, $8, {shift}; lop3.b32 p3, t, {mask}, p3, 0xEA;")
    for pair in range(4):
        if scaled:
            lines.append(f"fma.rn.bf16x2 p{pair}, p{pair}, $9, none;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, p{pair};")
    return tl.constexpr(" ".join([*lines, "}"]))


_UNPACKED, _TINY = _unpacked(scaled=True), _unpacked(scaled=False)
_REGISTERS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
_TINY_REGISTERS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")


@triton.jit
def _tiny_number(word: tl.tensor, INDEX: tl.constexpr) -> tl.tensor:
    """Returns number INDEX of each word times 2 ** -126, in float32."""
    low = word >> (16 * (INDEX % 2))
    if INDEX // 2 == 0:
        bits = low & 0x81C0
    elif INDEX // 2 == 1:
        bits = (low << 3) & 0x81C0
    elif INDEX // 2 == 2:
        bits = (low << 6) & 0x81C0
    else:
        bits = ((low << 1) & 0x8000) | ((low >> 5) & 0x0100) | ((low >> 4) & 0x00C0)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _number(
    word: tl.tensor, power: tl.tensor, kind: tl.constexpr, INDEX: tl.constexpr
) -> tl.tensor:
    """Returns number INDEX of each word, times the power, by way of float32."""
    return (_tiny_number(word, INDEX) * (power << 23).to(tl.float32, bitcast=True)).to(kind)


@triton.jit
def _joined(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor,
    e: tl.tensor, f: tl.tensor, g: tl.tensor, h: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Joins the eight numbers of each word in three dimensions, as `mxfp4_numbers` says."""
    low = tl.join(tl.join(a, b), tl.join(c, d))
    high = tl.join(tl.join(e, f), tl.join(g, h))
    return tl.join(low, high)


@triton.jit
def mxfp4_numbers(
    words: tl.tensor, powers: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr
) -> tl.tensor:
    """Unpacks words [..., 4] and their powers' bytes -> [..., 4, 2, 2, 2]: the last dimensions are
    the number of a pair, and the pair's lower and upper bit.

    IN_PAIRS: in bf16, two at once.
    """
    if IN_PAIRS:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _UNPACKED,
            _REGISTERS,
            [words, powers * 0x00800080],
            (
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            True,
            1,
        )
    else:
        a = _number(words, powers, kind, 0)
        b = _number(words, powers, kind, 1)
        c = _number(words, powers, kind, 2)
        d = _number(words, powers, kind, 3)
        e = _number(words, powers, kind, 4)
        f = _number(words, powers, kind, 5)
        g = _number(words, powers, kind, 6)
        h = _number(words, powers, kind, 7)
    return _joined(a, b, c, d, e, f, g, h)


@triton.jit
def tiny_mxfp4_numbers(words: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr) -> tl.tensor:
    """Unpacks words as `mxfp4_numbers` does, in bf16 or float32, but leaves their exponents out:
    the numbers are multiplied by 2 ** -126, which is how their bits lie. Some are denormal."""
    if IN_PAIRS:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _TINY,
            _TINY_REGISTERS,
            [words],
            (
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            True,
            1,
        )
    else:
        a = _tiny_number(words, 0).to(kind)
        b = _tiny_number(words, 1).to(kind)
        c = _tiny_number(words, 2).to(kind)
        d = _tiny_number(words, 3).to(kind)
        e = _tiny_number(words, 4).to(kind)
        f = _tiny_number(words, 5).to(kind)
        g = _tiny_number(words, 6).to(kind)
        h = _tiny_number(words, 7).to(kind)
    return _joined(a, b, c, d, e, f, g, h)


@triton.jit
def tile_places(
    tiles: tl.tensor, tile_row: tl.tensor, num_tile_columns: tl.tensor, COLUMN_TILES: tl.constexpr
) -> tl.tensor:
    """Returns where the first COLUMN_TILES tiles of rows of tiles, [ROW_TILES], begin: addresses
    [ROW_TILES, COLUMN_TILES, 1]."""
    column = tl.arange(0, COLUMN_TILES)
    tile = tile_row.to(tl.int64)[:, None, None] * num_tile_columns + column[None, :, None]
    return tiles + tile * 544


@triton.jit
def in_order_of_warps(given: tl.tensor) -> tl.tensor:
    """Orders rows [ROWS, DEPTH] as warps multiply that do so by themselves (BY_WARP below): four
    inputs of a thread lie beside each other, which in a tile are two and two."""
    ROWS: tl.constexpr = given.shape[0]
    DEPTH: tl.constexpr = given.shape[1]
    pieces = given.reshape(ROWS, DEPTH // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
    return pieces.reshape(ROWS, DEPTH)


@triton.jit
def mxfp4_weights(
    places: tl.tensor,
    inside: tl.tensor,
    kind: tl.constexpr,
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Loads tiles: a part [64 * ROW_TILES, 64 * COLUMN_TILES] of a weight.

    Args:
        places: As `tile_places` gives them, or so many tiles further.
        inside: [COLUMN_TILES], tiles that there are. EVEN: all.

    BY_WARP: inputs are ordered as one warp multiplies, else as four do together: in each 16 inputs,
    two and two of those that in order lie 8 apart are beside each other.
    """
    OUTPUTS: tl.constexpr = 64 * ROW_TILES
    GROUPS: tl.constexpr = 2 * COLUMN_TILES
    lane = tl.arange(0, 512)[None, None, :]
    byte_lane = tl.arange(0, 32)[None, None, :]
    if EVEN:
        words = tl.load(places + lane)
        exponents = tl.load(places + 512 + byte_lane)
    else:
        words = tl.load(places + lane, mask=inside[None, :, None], other=0)
        exponents = tl.load(places + 512 + byte_lane, mask=inside[None, :, None], other=0)
    words = words.reshape(ROW_TILES, COLUMN_TILES, 4, 8, 4, 2, 2).permute(0, 2, 6, 3, 1, 5, 4)
    exponents = exponents.reshape(ROW_TILES, COLUMN_TILES, 4, 8, 1, 1)
    shift = tl.arange(0, 4).reshape(1, 1, 1, 1, 2, 2) * 8
    powers = ((exponents >> shift) & 255).permute(0, 2, 5, 3, 1, 4)
    powers = tl.broadcast_to(powers.reshape(OUTPUTS, GROUPS, 1), (OUTPUTS, GROUPS, 4))
    numbers = mxfp4_numbers(words.reshape(OUTPUTS, GROUPS, 4), powers, kind, IN_PAIRS)
    if BY_WARP:  # noqa: SIM108
        numbers = numbers.permute(0, 1, 5, 2, 4, 3)
    else:
        numbers = numbers.permute(0, 1, 5, 4, 2, 3)
    return numbers.reshape(OUTPUTS, 32 * GROUPS)
