"""The write into the latent cache: norm, rotation of keys and queries, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.fp8_cache import e4m3_bits
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.device import uses_pdl


@triton.jit
def _store(
    to: tl.tensor, x: tl.tensor, kv_scale: tl.tensor, mask: tl.tensor, FP8: tl.constexpr
) -> None:
    """Writes float32 `x` into the cache."""
    if FP8:
        tl.store(to, e4m3_bits(tl.div_rn(x, tl.load(kv_scale))), mask=mask)
    else:
        tl.store(to, x.to(to.dtype.element_ty), mask=mask)


@triton.jit
def latent_rope_and_cache_kernel(
    q_rope: tl.tensor,
    kv: tl.tensor,
    weight: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    kv_cache: tl.tensor,
    slot_mapping: tl.tensor,
    kv_scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    kv_stride: tl.tensor,
    block_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Handles one token in each program. All is read before anything waits for what it read."""
    if OVERLAP:
        gdc_launch_dependents()
    dim = tl.arange(0, BLOCK_LATENT)
    is_latent = dim < LATENT
    norm_weight = tl.load(weight + dim, mask=is_latent, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    position = tl.load(positions + token)
    half = tl.arange(0, BLOCK_HALF)
    real = half < HALF
    head = tl.arange(0, HEADS)
    inside = (head < NUM_HEADS)[:, None] & real[None, :]
    place = q_rope + token * q_token_stride + head[:, None] * q_head_stride + half[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    row = kv + token * kv_stride
    latent = tl.load(row + dim, mask=is_latent, other=0.0).to(tl.float32)
    first_key = tl.load(row + LATENT + half, mask=real, other=0.0).to(tl.float32)
    second_key = tl.load(row + LATENT + HALF + half, mask=real, other=0.0).to(tl.float32)
    angle = position * (2 * HALF) + half
    cos = tl.load(cos_sin_cache + angle, mask=real, other=0.0)
    sin = tl.load(cos_sin_cache + angle + HALF, mask=real, other=0.0)
    kind = q_rope.dtype.element_ty
    tl.store(place, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=inside)
    tl.store(place + HALF, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=inside)
    if slot >= 0:
        to = kv_cache + (slot // BLOCK_SIZE) * block_stride
        to += (slot % BLOCK_SIZE) * (LATENT + 2 * HALF)
        scale = 1.0 / tl.sqrt_rn(tl.sum(latent * latent, axis=0) / LATENT + eps)
        _store(to + dim, latent * scale * norm_weight, kv_scale, is_latent, FP8)
        turned = first_key * cos - second_key * sin
        _store(to + LATENT + half, turned, kv_scale, real, FP8)
        turned = second_key * cos + first_key * sin
        _store(to + LATENT + HALF + half, turned, kv_scale, real, FP8)


def latent_rope_and_cache(
    q_rope: Tensor,
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    kv_scales: KVScales | None = None,
) -> None:
    """See `reference.latent.latent_rope_and_cache`."""
    num_tokens, num_heads, rope = q_rope.shape
    if num_tokens == 0:
        return
    overlap = uses_pdl(q_rope.device, num_tokens)
    latent_rope_and_cache_kernel[(num_tokens,)](
        q_rope,
        kv,
        weight,
        positions,
        cos_sin_cache,
        kv_cache if kv_scales is None else kv_cache.view(torch.uint8),
        slot_mapping,
        pointers(kv_scales)[0],
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        kv_cache.stride(0),
        eps,
        NUM_HEADS=num_heads,
        HEADS=triton.next_power_of_2(num_heads),
        LATENT=len(weight),
        BLOCK_LATENT=triton.next_power_of_2(len(weight)),
        HALF=rope // 2,
        BLOCK_HALF=triton.next_power_of_2(rope // 2),
        BLOCK_SIZE=kv_cache.shape[1],
        OVERLAP=overlap,
        FP8=kv_scales is not None,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
