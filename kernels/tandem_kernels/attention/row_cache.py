"""Writes of whole rows into the cache: of tokens whose row is open, and of rows that are closed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.narrow_vectors import store_narrow
from tandem_kernels.attention.token_rows import NarrowRows, OpenTokens, RowPages
from tandem_kernels.small_launches import in_turn, take_turn

_BLOCK = 1024


@triton.jit
def cache_rows_kernel(
    x: tl.tensor,
    pages: tl.tensor,
    slot_mapping: tl.tensor,
    x_stride: tl.tensor,
    block_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Writes, in program (t, j), numbers j * BLOCK and on of the row of token t."""
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        row = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
        to = pages + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * WIDTH + column
        tl.store(to, row.to(pages.dtype.element_ty), mask=inside)


@triton.jit
def cache_narrow_rows_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    rotated: tl.tensor,
    exponents: tl.tensor,
    slot_mapping: tl.tensor,
    x_stride: tl.tensor,
    block_stride: tl.tensor,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    EXPONENTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Writes, in program t, the row of token t."""
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        row = tl.load(x + token * x_stride + tl.arange(0, DIM)).to(tl.float32)[None, :]
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        real = tl.full((1, 1), 1, tl.int1)
        store_narrow(
            row, numbers, rotated, exponents, block, place, real, block_stride, 1, DIM, ROPE,
            EXPONENTS,
        )  # fmt: skip


def cache_rows(x: Tensor, pages: RowPages, slot_mapping: Tensor) -> None:
    """See `reference.token_rows.cache_rows`."""
    num_tokens, width = x.shape
    if num_tokens == 0:
        return
    if isinstance(pages, NarrowRows):
        _cache_narrow_rows(x, pages, slot_mapping)
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    cache_rows_kernel[(num_tokens, triton.cdiv(width, block))](
        x,
        pages,
        slot_mapping,
        x.stride(0),
        pages.stride(0),
        WIDTH=width,
        BLOCK_SIZE=pages.shape[1],
        BLOCK=block,
        num_warps=4,
        **in_turn(x.device, num_tokens),
    )


def _cache_narrow_rows(x: Tensor, pages: NarrowRows, slot_mapping: Tensor) -> None:
    cache_narrow_rows_kernel[(len(x),)](
        x,
        pages.numbers.view(torch.uint8),
        pages.rotated,
        pages.exponents,
        slot_mapping,
        x.stride(0),
        pages.numbers.stride(0),
        DIM=x.shape[1],
        ROPE=pages.rotated.shape[2],
        EXPONENTS=pages.exponents.shape[2],
        BLOCK_SIZE=pages.shape[1],
        num_warps=4,
        **in_turn(x.device, len(x)),
    )


def keep_open_tokens(x: Tensor, rows: OpenTokens) -> None:
    """See `reference.token_rows.keep_open_tokens`."""
    cache_rows(x, rows.pages, rows.slot_mapping)
