"""The write of the index keys of closed rows, and queries as they are multiplied with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.fp8_cache import e4m3_bits
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.index_rope_and_cache import hadamard_signs
from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.attention.turned_pairs import pair_angles, turned_pairs
from tandem_kernels.small_launches import in_turn, take_turn

_ROWS, _ROWS_OF_MANY, _MANY = 16, 64, 256
"""Heads of a program, and of steps with this many tokens: each makes the matrix by which they are
spread, which takes 8192 tokens 336 us by 16 heads and 179 by 64 (one H200). Keys have a program of
their own."""


@triton.jit
def index_rows_kernel(
    q: tl.tensor,
    k: tl.tensor,
    head_weights: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    keys: tl.tensor,
    scales: tl.tensor,
    slot_mapping: tl.tensor,
    queries: tl.tensor,
    weights: tl.tensor,
    q_token_stride: tl.tensor,
    k_stride: tl.tensor,
    head_weights_stride: tl.tensor,
    key_block_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Handles, in program (t, i), tile i of the heads of token t; behind them the key of the row
    that it closes.

    NORM: The root of D to the power of minus one, of the Hadamard matrix.
    """
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_key = tile * ROWS >= NUM_HEADS
    dim = tl.arange(0, D)
    row = tl.arange(0, ROWS)
    head = tile * ROWS + row
    kind = q.dtype.element_ty
    slot = tl.load(slot_mapping + token)
    if is_key & (slot < 0):
        return
    if is_key:
        real = row == 0
        key = k + token * k_stride + row[:, None] * 0 + dim[None, :]
        x = tl.load(key, mask=real[:, None], other=0.0)
    else:
        real = head < NUM_HEADS
        query = q + token * q_token_stride + head[:, None] * D + dim[None, :]
        x = tl.load(query, mask=real[:, None], other=0.0).to(tl.float32)
        cos, sin = pair_angles(cos_sin_cache, tl.load(positions + token), D, ROPE)
        x = turned_pairs(x, cos[None, :], sin[None, :], ROWS, D)
    # As in the model's dtype: an FP8 cache rounds what the model would have multiplied.
    x = x.to(kind)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    of_key = block * key_block_stride + offset * D + row[:, None] * 0 + dim[None, :]
    at = token * NUM_HEADS + head
    of_query = at[:, None] * D + dim[None, :]
    if FP8:
        spread = tl.dot(x, hadamard_signs(D, kind)) * NORM
        largest = tl.maximum(tl.max(tl.abs(spread), axis=1), 1e-4)
        bits = tl.div_rn(largest, 448.0).to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        stored = e4m3_bits(spread / scale[:, None])
        if is_key:
            tl.store(keys + of_key, stored, mask=real[:, None])
            to = scales + block * scale_block_stride + offset + row * 0
            tl.store(to, scale, mask=real)
        else:
            tl.store(queries + of_query, stored, mask=real[:, None])
            own = head_weights + token * head_weights_stride + head
            weight = tl.load(own, mask=real, other=0.0)
            tl.store(weights + at, weight * scale, mask=real)
    else:
        wide = x.to(tl.float32)
        if is_key:
            tl.store(keys + of_key, wide, mask=real[:, None])
        else:
            tl.store(queries + of_query, wide, mask=real[:, None])


def index_rows(
    q: Tensor,
    keys: Tensor,
    head_weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    pages: IndexPages,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `reference.token_rows.index_rows`."""
    num_tokens, num_heads, dim = q.shape
    stored, scales = pages.keys, pages.scales
    fp8 = scales is not None
    queries = torch.empty(q.shape, dtype=E4M3 if fp8 else torch.float32, device=q.device)
    weights = torch.empty_like(head_weights) if fp8 else head_weights
    if num_tokens == 0:
        return queries, weights
    rows = _ROWS if num_tokens < _MANY else _ROWS_OF_MANY
    index_rows_kernel[(num_tokens, triton.cdiv(num_heads, rows) + 1)](
        q,
        keys,
        head_weights,
        positions,
        cos_sin_cache,
        stored.view(torch.uint8) if fp8 else stored,
        scales,
        slot_mapping,
        queries.view(torch.uint8) if fp8 else queries,
        weights,
        q.stride(0),
        keys.stride(0),
        head_weights.stride(0),
        stored.stride(0),
        0 if scales is None else scales.stride(0),
        NUM_HEADS=num_heads,
        ROWS=rows,
        D=dim,
        ROPE=cos_sin_cache.shape[1],
        BLOCK_SIZE=stored.shape[1],
        NORM=dim**-0.5,
        FP8=fp8,
        num_warps=4,
        **in_turn(q.device, num_tokens),
    )
    return queries, weights
