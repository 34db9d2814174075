"""Copies keys and values of cached contexts out of their pages, for kernels that read none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.kv_pages import PagedKV, apart
from tandem_kernels.attention.kv_scales import KVScales, pointers

_ADDRESSES = ["block_tables", "first", "bounds"]
"""Parts of larger tensors, whose alignment must not compile the kernel anew."""
_TILE = 32
"""Tokens of a program: with heads of 128 numbers in half precision, 8 KiB."""


@triton.jit(do_not_specialize=["num_reqs", "num_keys"], do_not_specialize_on_alignment=_ADDRESSES)
def gather_context_kernel(
    plane: tl.tensor,
    block_tables: tl.tensor,
    first: tl.tensor,
    bounds: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    num_reqs: tl.tensor,
    num_keys: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Copies `TILE` tokens of one head of a plane in each program."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    request = tl.zeros([TILE], tl.int32)
    for r in range(1, num_reqs):
        request += (row >= tl.load(bounds + r)).to(tl.int32)
    inside = row < num_keys
    position = tl.load(first + request) + row - tl.load(bounds + request)
    table = block_tables + request.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM)
    taken = inside[:, None] & (dim < HEAD_DIM)[None, :]
    line = block * block_stride + (head * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    numbers = tl.load(plane + line[:, None] + dim[None, :], mask=taken, other=0.0)
    if FP8:
        numbers = numbers.to(tl.float32) * tl.load(scales + head)
    to = (head.to(tl.int64) * num_keys + row) * HEAD_DIM
    place = out + to[:, None] + dim[None, :]
    tl.store(place, numbers.to(out.dtype.element_ty), mask=taken)


def gather_context(
    kv_cache: PagedKV,
    block_tables: Tensor,
    first: Tensor,
    bounds: Tensor,
    num_keys: int,
    dtype: torch.dtype,
    kv_scales: KVScales | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attention.gather_context`."""
    pages = apart(kv_cache)
    k_scale, v_scale = pointers(kv_scales)
    places = block_tables, first, bounds
    return (
        _gathered(pages.k, places, num_keys, dtype, k_scale),
        _gathered(pages.v, places, num_keys, dtype, v_scale),
    )


def _gathered(
    plane: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    num_keys: int,
    dtype: torch.dtype,
    scales: Tensor | None,
) -> Tensor:
    """Returns [S, Hkv, D] of a plane [N, Hkv, B, D]."""
    _, num_heads, block_size, width = plane.shape
    block_tables, first, bounds = places
    out = torch.empty((num_heads, num_keys, width), dtype=dtype, device=plane.device)
    gather_context_kernel[(triton.cdiv(num_keys, _TILE), num_heads)](
        plane,
        block_tables,
        first,
        bounds,
        out,
        scales,
        len(first),
        num_keys,
        plane.stride(0),
        block_tables.stride(0),
        HEAD_DIM=width,
        BLOCK_DIM=triton.next_power_of_2(width),
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        FP8=scales is not None,
        num_warps=4,
    )
    return out.transpose(0, 1)
