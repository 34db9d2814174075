"""Norm and rotation of queries in place, and the write of the one vector that all heads share."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.narrow_vectors import page_pointers, page_widths, store_narrow
from tandem_kernels.attention.token_rows import RowPages
from tandem_kernels.attention.turned_pairs import pair_angles, turned_pairs
from tandem_kernels.small_launches import in_turn, take_turn

_ROWS = 8
"""Heads of a program; the shared vector has one of its own."""


@triton.jit
def shared_rope_and_cache_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    weight: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    pages: tl.tensor,
    rotated: tl.tensor,
    exponents: tl.tensor,
    slot_mapping: tl.tensor,
    q_token_stride: tl.tensor,
    kv_stride: tl.tensor,
    block_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NARROW_ROPE: tl.constexpr,
    EXPONENTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Handles, in program (t, i), tile i of the heads of token t; behind them its vector.

    NARROW_ROPE: Numbers of a narrow vector that are not in e4m3; 0: vectors are not narrow.
    """
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dim = tl.arange(0, D)
    row = tl.arange(0, ROWS)
    kind = q.dtype.element_ty
    cos, sin = pair_angles(cos_sin_cache, tl.load(positions + token), D, ROPE)
    cos, sin = cos[None, :], sin[None, :]
    if tile * ROWS < NUM_HEADS:
        head = tile * ROWS + row
        real = (head < NUM_HEADS)[:, None]
        place = q + token * q_token_stride + head[:, None] * D + dim[None, :]
        x = tl.load(place, mask=real, other=0.0).to(tl.float32)
        x = x / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)[:, None]
        tl.store(place, turned_pairs(x, cos, sin, ROWS, D).to(kind), mask=real)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            first = (row == 0)[:, None]
            place = kv + token * kv_stride + row[:, None] * 0 + dim[None, :]
            x = tl.load(place, mask=first, other=0.0).to(tl.float32)
            x = x / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)[:, None]
            x = (x * tl.load(weight + dim)[None, :]).to(kind).to(tl.float32)
            x = turned_pairs(x, cos, sin, ROWS, D)
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            if NARROW_ROPE > 0:
                store_narrow(
                    x, pages, rotated, exponents, block, offset, first, block_stride, ROWS, D,
                    NARROW_ROPE, EXPONENTS,
                )  # fmt: skip
            else:
                to = pages + block * block_stride + offset * D + row[:, None] * 0 + dim[None, :]
                tl.store(to, x.to(pages.dtype.element_ty), mask=first)


def shared_rope_and_cache(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    pages: RowPages,
    slot_mapping: Tensor,
    eps: float,
) -> None:
    """See `reference.token_rows.shared_rope_and_cache`."""
    num_tokens, num_heads, dim = q.shape
    if num_tokens == 0:
        return
    vectors = page_pointers(pages, written=True)
    shared_rope_and_cache_kernel[(num_tokens, triton.cdiv(num_heads, _ROWS) + 1)](
        q,
        kv,
        weight,
        positions,
        cos_sin_cache,
        *vectors,
        slot_mapping,
        q.stride(0),
        kv.stride(0),
        vectors[0].stride(0),
        eps,
        NUM_HEADS=num_heads,
        ROWS=_ROWS,
        D=dim,
        ROPE=cos_sin_cache.shape[1],
        BLOCK_SIZE=pages.shape[1],
        **page_widths(pages),
        num_warps=4,
        **in_turn(q.device, num_tokens),
    )
