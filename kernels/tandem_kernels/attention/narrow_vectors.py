"""Vectors with e4m3 numbers and exponents, read from pages into registers and written back.

    page | numbers [B, D - R] e4m3 | the last R numbers of a vector [B, R] | exponents [B, S] |

Numbers times a power of two are exact in 16 bits, so that attention multiplies what was kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.fp8_cache import e4m3_bits
from tandem_kernels.attention.token_rows import NarrowRows, RowPages


@triton.jit
def load_narrow(
    numbers: tl.tensor,
    rotated: tl.tensor,
    exponents: tl.tensor,
    block: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    block_stride: tl.tensor,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    SPAN: tl.constexpr,
    EXPONENTS: tl.constexpr,
) -> tl.tensor:
    """Returns vectors [TILE, DIM] in the type of `rotated`; those that are not `inside` are zero.

    Args:
        numbers, exponents: Pointers of e4m3 and of uint8.
        block, place: [TILE], in which block a vector lies, int64, and its number there.
        block_stride: Bytes from block to block.
        DIM: A power of two.
        SPAN: The least power of two that is no less than ROPE.
        EXPONENTS: That a vector has, S.
    """
    GROUP: tl.constexpr = 64 if DIM > 64 else DIM
    size: tl.constexpr = DIM - ROPE
    begin = block * block_stride
    dim = tl.arange(0, DIM)
    is_low = inside[:, None] & (dim < size)[None, :]
    at = begin + place * size
    low = tl.load(numbers + at[:, None] + dim[None, :], mask=is_low, other=0.0)
    index = tl.arange(0, DIM // GROUP)
    real = inside[:, None] & (index * GROUP < size)[None, :]
    at = begin + place * EXPONENTS
    power = tl.load(exponents + at[:, None] + index[None, :], mask=real, other=0)
    scale = (power.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(scale[:, :, None], (TILE, DIM // GROUP, GROUP))
    # The last numbers, of which a tile of all would take as much room as the rest together.
    column = tl.arange(0, SPAN) - (SPAN - ROPE)
    real = inside[:, None] & (column >= 0)[None, :]
    wide: tl.constexpr = rotated.dtype.element_ty.primitive_bitwidth // 8
    at = block * (block_stride // wide) + place * ROPE
    last = tl.load(rotated + at[:, None] + column[None, :], mask=real, other=0.0)
    high = tl.broadcast_to(last[:, None, :], (TILE, DIM // SPAN, SPAN))
    wide_numbers = (low.to(tl.float32) * tl.reshape(scale, (TILE, DIM))).to(last.dtype)
    return tl.where((dim < size)[None, :], wide_numbers, tl.reshape(high, (TILE, DIM)))


@triton.jit
def store_narrow(
    x: tl.tensor,
    numbers: tl.tensor,
    rotated: tl.tensor,
    exponents: tl.tensor,
    block: tl.tensor,
    place: tl.tensor,
    real: tl.tensor,
    block_stride: tl.tensor,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    EXPONENTS: tl.constexpr,
) -> None:
    """Writes the one row of `x` [ROWS, DIM] float32 that is `real` [ROWS, 1]; `numbers` are bytes.

    DIM: A power of two.
    """
    GROUP: tl.constexpr = 64 if DIM > 64 else DIM
    COUNT: tl.constexpr = DIM // GROUP
    size: tl.constexpr = DIM - ROPE
    dim = tl.arange(0, DIM)
    is_low = (dim < size)[None, :]
    groups = tl.reshape(tl.where(is_low, tl.abs(x), 0.0), (ROWS, COUNT, GROUP))
    largest = tl.maximum(tl.max(groups, axis=2), 1e-4)
    # The largest number of e4m3 is 1.75 * 2^8: above a mantissa of 1.75 it takes a power more.
    power = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    spread = tl.broadcast_to(inverse[:, :, None], (ROWS, COUNT, GROUP))
    stored = e4m3_bits(x * tl.reshape(spread, (ROWS, DIM)))
    begin = block * block_stride + tl.arange(0, ROWS)[:, None] * 0
    tl.store(numbers + begin + place * size + dim[None, :], stored, mask=real & is_low)
    index = tl.arange(0, COUNT)
    to = exponents + begin + place * EXPONENTS + index[None, :]
    tl.store(to, power.to(tl.uint8), mask=real & (index * GROUP < size)[None, :])
    wide: tl.constexpr = rotated.dtype.element_ty.primitive_bitwidth // 8
    to = rotated + begin // wide + place * ROPE + (dim - size)[None, :]
    tl.store(to, x.to(rotated.dtype.element_ty), mask=real & (dim >= size)[None, :])


def page_pointers(
    pages: RowPages, *, written: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns what kernels are given of pages: tensors of vectors, and of the rest of narrow ones.
    Numbers that are `written` are bytes."""
    if isinstance(pages, NarrowRows):
        numbers = pages.numbers.view(torch.uint8) if written else pages.numbers
        return numbers, pages.rotated, pages.exponents
    return pages, None, None


def page_widths(pages: RowPages) -> dict[str, int]:
    """Returns the sizes of narrow pages as kernels take them; of others 0."""
    if isinstance(pages, NarrowRows):
        return {"NARROW_ROPE": pages.rotated.shape[2], "EXPONENTS": pages.exponents.shape[2]}
    return {"NARROW_ROPE": 0, "EXPONENTS": 0}
