"""Weights that come to the cache while memory would stand still.

A small kernel keeps few SMs busy and memory idle. The weights of the product behind it depend on
nothing, so spare programs of the small kernel may ask for the beginning of each of their rows.
Asking is a hint: nobody waits for it, and no value depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LINE = 64
"""Half-precision elements of a cache line."""
PROGRAMS = 128
_LANES = 256


@triton.jit
def ask_for(places: tl.tensor) -> None:
    """The cache lines of these addresses come to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_for_rows(
    weight: tl.tensor,
    program: tl.tensor,
    num_programs: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    LINES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """One program's part of the first LINES lines of each row of `weight` [num_rows, inner]."""
    for start in range(program * LANES, num_rows * LINES, num_programs * LANES):
        place = start + tl.arange(0, LANES)
        place = tl.minimum(place, num_rows * LINES - 1)
        row = place // LINES
        ask_for(weight + row.to(tl.int64) * inner + place % LINES * 64)


def lines_of(weight: Tensor | None, num_bytes: int) -> int:
    """How many lines of each row make about `num_bytes`."""
    if weight is None or num_bytes == 0:
        return 0
    num_rows, inner = weight.shape
    return min(max(1, num_bytes // (num_rows * LINE * 2)), inner // LINE)
