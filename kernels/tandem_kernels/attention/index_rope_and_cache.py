"""The write of index keys, and queries as they are multiplied with them, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.fp8_cache import e4m3_bits
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.kv_scales import E4M3

_ROWS = 16
"""Heads of a program; keys have one of their own."""


@triton.jit
def _turned(
    x: tl.tensor,
    partner: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    dim: tl.tensor,
    ROPE: tl.constexpr,
) -> tl.tensor:
    """Rotates rows [ROWS, D], whose elements turn with those of `partner`."""
    signed = tl.where(dim < ROPE // 2, -sin, sin)
    turned = x * cos[None, :] + partner * signed[None, :]
    return tl.where((dim < ROPE)[None, :], turned, x)


@triton.jit
def hadamard_signs(D: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Returns the signs of the Hadamard matrix, [D, D]: those of even and odd common bits."""
    i = tl.arange(0, D)
    both = i[:, None] & i[None, :]
    both = both ^ (both >> 8)
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return (1 - 2 * (both & 1)).to(dtype)


@triton.jit
def index_rope_and_cache_kernel(
    q: tl.tensor,
    k: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
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
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Handles, in program (t, i), tile i of the heads of token t; behind them its key.

    NORM: The root of D to the power of minus one, of the Hadamard matrix.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_key = tile * ROWS >= NUM_HEADS
    dim = tl.arange(0, D)
    half: tl.constexpr = ROPE // 2
    other = tl.where(dim < half, dim + half, tl.where(dim < ROPE, dim - half, dim))
    position = tl.load(positions + token)
    pair = dim % half
    angle = cos_sin_cache + position * ROPE + pair
    cos = tl.load(angle, mask=dim < ROPE, other=1.0)
    sin = tl.load(angle + half, mask=dim < ROPE, other=0.0)
    row = tl.arange(0, ROWS)
    head = tile * ROWS + row
    kind = q.dtype.element_ty
    if is_key:
        real = row == 0
        place = k + token * k_stride + row[:, None] * 0
        x = tl.load(place + dim[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        partner = tl.load(place + other[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=1) / D
        centred = x - mean[:, None]
        variance = tl.sum(centred * centred, axis=1) / D
        length = 1.0 / tl.sqrt_rn(variance + eps)
        x = centred * length[:, None] * tl.load(norm_weight + dim)[None, :]
        x = x + tl.load(norm_bias + dim)[None, :]
        partner = (partner - mean[:, None]) * length[:, None]
        partner = partner * tl.load(norm_weight + other)[None, :]
        partner = partner + tl.load(norm_bias + other)[None, :]
    else:
        real = head < NUM_HEADS
        place = q + token * q_token_stride + head[:, None] * D
        x = tl.load(place + dim[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        partner = tl.load(place + other[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    x = _turned(x, partner, cos, sin, dim, ROPE).to(kind)
    slot = tl.load(slot_mapping + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    writes_key = is_key & (slot >= 0)
    if FP8:
        spread = tl.dot(x, hadamard_signs(D, kind)) * NORM
        largest = tl.maximum(tl.max(tl.abs(spread), axis=1), 1e-4)
        bits = tl.div_rn(largest, 448.0).to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        stored = e4m3_bits(spread / scale[:, None])
        if is_key:
            of_key = keys + block * key_block_stride + offset * D + row[:, None] * 0
            tl.store(of_key + dim[None, :], stored, mask=(real & writes_key)[:, None])
            of_key = scales + block * scale_block_stride + offset + row * 0
            tl.store(of_key, scale, mask=real & writes_key)
        else:
            at = token * NUM_HEADS + head
            tl.store(queries + at[:, None] * D + dim[None, :], stored, mask=real[:, None])
            weight = tl.load(
                head_weights + token * head_weights_stride + head, mask=real, other=0.0
            )
            tl.store(weights + at, weight * scale, mask=real)
    else:
        if is_key:
            of_key = keys + block * key_block_stride + offset * D + row[:, None] * 0
            tl.store(of_key + dim[None, :], x.to(tl.float32), mask=(real & writes_key)[:, None])
        else:
            at = token * NUM_HEADS + head
            wide = x.to(tl.float32)
            tl.store(queries + at[:, None] * D + dim[None, :], wide, mask=real[:, None])


def index_rope_and_cache(
    q: Tensor,
    k: Tensor,
    k_norm: tuple[Tensor, Tensor],
    head_weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    pages: IndexPages,
    slot_mapping: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.index.index_rope_and_cache`."""
    num_tokens, num_heads, dim = q.shape
    fp8 = pages.scales is not None
    keys, scales = pages.keys, pages.scales
    queries = torch.empty(q.shape, dtype=E4M3 if fp8 else torch.float32, device=q.device)
    weights = torch.empty_like(head_weights) if fp8 else head_weights
    if num_tokens == 0:
        return queries, weights
    index_rope_and_cache_kernel[(num_tokens, triton.cdiv(num_heads, _ROWS) + 1)](
        q,
        k,
        *k_norm,
        head_weights,
        positions,
        cos_sin_cache,
        keys.view(torch.uint8) if fp8 else keys,
        scales,
        slot_mapping,
        queries.view(torch.uint8) if fp8 else queries,
        weights,
        q.stride(0),
        k.stride(0),
        head_weights.stride(0),
        keys.stride(0),
        0 if scales is None else scales.stride(0),
        eps,
        NUM_HEADS=num_heads,
        ROWS=_ROWS,
        D=dim,
        ROPE=cos_sin_cache.shape[1],
        BLOCK_SIZE=keys.shape[1],
        NORM=dim**-0.5,
        FP8=fp8,
        num_warps=4,
    )
    return queries, weights
