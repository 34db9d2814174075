"""Reads latents of cached contexts, so that they can be expanded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.kv_scales import KVScales, pointers

_ADDRESSES = ["block_tables", "first", "bounds"]
"""Parts of larger tensors, whose alignment must not compile the kernel anew."""


@triton.jit
def _request_of(bounds: tl.tensor, row: tl.tensor, num_reqs: tl.tensor) -> tl.tensor:
    """Returns the last request that begins at or before a row, and so owns it."""
    lo = 1
    hi = num_reqs
    while lo < hi:
        middle = (lo + hi) // 2
        if tl.load(bounds + middle) <= row:
            lo = middle + 1
        else:
            hi = middle
    return lo - 1


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=_ADDRESSES)
def gather_latents_kernel(
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    first: tl.tensor,
    bounds: tl.tensor,
    latents: tl.tensor,
    keys: tl.tensor,
    kv_scale: tl.tensor,
    num_reqs: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Reads one row in each program. Rows behind the last request's become zero."""
    row = tl.program_id(0)
    real = row < tl.load(bounds + num_reqs)
    r = _request_of(bounds, row, num_reqs)
    position = tl.load(first + r) + row - tl.load(bounds + r)
    table = block_tables + r.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=real, other=0)
    line = kv_cache + block.to(tl.int64) * block_stride
    line += position % BLOCK_SIZE * (LATENT + ROPE)
    dim = tl.arange(0, BLOCK_LATENT)
    rot = tl.arange(0, BLOCK_ROPE)
    head = tl.arange(0, HEADS)
    is_latent = dim < LATENT
    is_rope = rot < ROPE
    to = row.to(tl.int64)
    kind = latents.dtype.element_ty
    latent = tl.load(line + dim, mask=is_latent & real, other=0.0)
    key = tl.load(line + LATENT + rot, mask=is_rope & real, other=0.0)
    if FP8:
        scale = tl.load(kv_scale)
        latent, key = latent.to(tl.float32) * scale, key.to(tl.float32) * scale
    tl.store(latents + to * LATENT + dim, latent.to(kind), mask=is_latent)
    key = key.to(kind)
    place = keys + to * key_token_stride + head[:, None] * key_head_stride + rot[None, :]
    inside = (head < NUM_HEADS)[:, None] & is_rope[None, :]
    tl.store(place, tl.broadcast_to(key[None, :], [HEADS, BLOCK_ROPE]), mask=inside)


def gather_latents(
    kv_cache: Tensor,
    block_tables: Tensor,
    first: Tensor,
    bounds: Tensor,
    keys: Tensor,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """See `reference.latent.gather_latents`."""
    num_rows, num_heads, rope = keys.shape
    size = kv_cache.shape[2] - rope
    latents = torch.empty((num_rows, size), dtype=keys.dtype, device=keys.device)
    gather_latents_kernel[(num_rows,)](
        kv_cache,
        block_tables,
        first,
        bounds,
        latents,
        keys,
        pointers(kv_scales)[0],
        len(first),
        kv_cache.stride(0),
        block_tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        NUM_HEADS=num_heads,
        HEADS=triton.next_power_of_2(num_heads),
        LATENT=size,
        BLOCK_LATENT=triton.next_power_of_2(size),
        ROPE=rope,
        BLOCK_ROPE=triton.next_power_of_2(rope),
        BLOCK_SIZE=kv_cache.shape[1],
        FP8=kv_scales is not None,
        num_warps=2,
    )
    return latents
