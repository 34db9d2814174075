"""The rotation of vectors whose last numbers turn in pairs that are adjacent."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_angles(
    cos_sin_cache: tl.tensor, position: tl.tensor, D: tl.constexpr, ROPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns cosines and sines of the pairs of a vector [D] at a position, [D / 2]: the first of
    them stay."""
    cos, sin = angles_from(cos_sin_cache, position, 0, D, D, ROPE)
    return cos, sin


@triton.jit
def angles_from(
    cos_sin_cache: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the same of WIDTH numbers from `first` on, [WIDTH / 2]."""
    pair = first // 2 + tl.arange(0, WIDTH // 2) - (D - ROPE) // 2
    turns = pair >= 0
    angle = cos_sin_cache + position * ROPE + pair
    cos = tl.load(angle, mask=turns, other=1.0)
    return cos, tl.load(angle + ROPE // 2, mask=turns, other=0.0)


@triton.jit
def turned_pairs(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, ROWS: tl.constexpr, D: tl.constexpr
) -> tl.tensor:
    """Rotates rows [ROWS, D]. Every number stays where it was, also among threads."""
    even, odd = tl.split(x.reshape(ROWS, D // 2, 2))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return turned.reshape(ROWS, D)
