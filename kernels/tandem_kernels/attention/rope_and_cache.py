"""Rotary embedding of queries and keys, and the write into the paged KV cache, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.fp8_cache import e4m3_bits
from tandem_kernels.attention.kv_pages import PagedKV, first_of, sizes_of, strides_of
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.value_form import PLAIN_VALUES, ValueForm
from tandem_kernels.device import supports_pdl, uses_pdl

HEADS_PER_PROGRAM = 8
WIDE_HEADS, WIDE_WARPS = 32, 4
"""Prompts take these: vectors of 16 bytes, and a third of the programs."""
MANY_TOKENS = 256
"""The smallest number for that: fewer have too few programs for all SMs."""


@triton.jit
def _rotated_halves(
    place: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """Load heads at `place` [heads, half], normalise if asked, rotate; two float32 tiles."""
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt_rn(mean_square + eps))[:, None]
        first_weight = tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
        first = first * scale * first_weight[None, :]
        second = second * scale * second_weight[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store(
    to: tl.tensor, x: tl.tensor, scales: tl.tensor, head: tl.tensor, inside: tl.tensor,
    FP8: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Writes `x` [heads, half] into the cache."""
    if FP8:
        scale = tl.load(scales + head, mask=head < NUM_KV_HEADS, other=1.0)
        tl.store(to, e4m3_bits(tl.div_rn(x.to(tl.float32), scale[:, None])), mask=inside)
    else:
        tl.store(to, x.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _value_halves(
    place: tl.tensor, inside: tl.tensor, eps: tl.tensor, value_scale: tl.tensor,
    VALUE_HALF: tl.constexpr, NORM_VALUES: tl.constexpr, SCALE_VALUES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load values at `place` [heads, half], as `ValueForm` has them; two tiles."""
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + VALUE_HALF, mask=inside, other=0.0)
    if NORM_VALUES or SCALE_VALUES:
        first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM_VALUES:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt_rn(squares / (2 * VALUE_HALF) + eps))[:, None]
        first, second = first * scale, second * scale
    if SCALE_VALUES:
        first, second = first * value_scale, second * value_scale
    return first, second


@triton.jit
def rope_and_cache_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    kv_cache: tl.tensor,
    slot_mapping: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    eps: tl.tensor,
    value_scale: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    VALUE_HALF: tl.constexpr,
    BLOCK_VALUE_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    SCALE_VALUES: tl.constexpr,
    KEEP_K: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Rotates, in program (t, j), heads j * HEADS and on of token t, the query's first, then the
    keys'.
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    half = tl.arange(0, BLOCK_HALF)
    angle = tl.load(positions + token) * (2 * HALF) + half
    cos = tl.load(cos_sin_cache + angle, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_cache + angle + HALF, mask=half < HALF, other=0.0)[None, :]
    slot = tl.load(slot_mapping + token)
    if USE_PDL:
        gdc_wait()
    lane = tl.arange(0, HEADS)
    if tile < q_tiles:
        head = tile * HEADS + lane
        inside = (head < NUM_Q_HEADS)[:, None] & (half < HALF)[None, :]
        place = q + token * q_stride + head[:, None] * (2 * HALF) + half[None, :]
        first, second = _rotated_halves(
            place, q_weight, cos, sin, inside, half, eps, HALF, HAS_NORM
        )
        tl.store(place, first.to(q.dtype.element_ty), mask=inside)
        tl.store(place + HALF, second.to(q.dtype.element_ty), mask=inside)
    else:
        if slot >= 0:
            head = (tile - q_tiles) * HEADS + lane
            inside = (head < NUM_KV_HEADS)[:, None] & (half < HALF)[None, :]
            place = k + token * k_stride + head[:, None] * (2 * HALF) + half[None, :]
            first, second = _rotated_halves(
                place, k_weight, cos, sin, inside, half, eps, HALF, HAS_NORM
            )
            if KEEP_K:
                tl.store(place, first.to(k.dtype.element_ty), mask=inside)
                tl.store(place + HALF, second.to(k.dtype.element_ty), mask=inside)
            page = kv_cache + (slot // BLOCK_SIZE) * block_stride
            row = head[:, None] * BLOCK_SIZE + slot % BLOCK_SIZE
            to = page + row * (2 * HALF) + half[None, :]
            _store(to, first, k_scale, head, inside, FP8, NUM_KV_HEADS)
            _store(to + HALF, second, k_scale, head, inside, FP8, NUM_KV_HEADS)
            if VALUE_HALF == 0:
                return
            lanes = tl.arange(0, BLOCK_VALUE_HALF)
            real = (head < NUM_KV_HEADS)[:, None] & (lanes < VALUE_HALF)[None, :]
            own = v + token * v_stride + head[:, None] * (2 * VALUE_HALF) + lanes[None, :]
            first_value, second_value = _value_halves(
                own, real, eps, value_scale, VALUE_HALF, NORM_VALUES, SCALE_VALUES
            )
            if KEEP_K and (NORM_VALUES or SCALE_VALUES):
                tl.store(own, first_value.to(v.dtype.element_ty), mask=real)
                tl.store(own + VALUE_HALF, second_value.to(v.dtype.element_ty), mask=real)
            to = page + value_stride + row * (2 * VALUE_HALF) + lanes[None, :]
            _store(to, first_value, v_scale, head, real, FP8, NUM_KV_HEADS)
            _store(to + VALUE_HALF, second_value, v_scale, head, real, FP8, NUM_KV_HEADS)


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: PagedKV,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    keep_k: bool = False,
    kv_scales: KVScales | None = None,
    values: ValueForm = PLAIN_VALUES,
) -> Tensor:
    """See `reference.elementwise.rope_and_cache`. The heads of one token must be adjacent."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    if num_tokens == 0:
        return q
    heads, num_warps = HEADS_PER_PROGRAM, 2
    if num_tokens >= MANY_TOKENS:
        heads, num_warps = WIDE_HEADS, WIDE_WARPS
    tiles = triton.cdiv(num_q_heads, heads) + triton.cdiv(num_kv_heads, heads)
    use_pdl = uses_pdl(q.device, num_tokens)
    rope_and_cache_kernel[(num_tokens, tiles)](
        q,
        k,
        v,
        positions,
        cos_sin_cache,
        first_of(kv_cache if kv_scales is None else kv_cache.view(torch.uint8)),
        slot_mapping,
        q_weight,
        k_weight,
        *pointers(kv_scales),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *strides_of(kv_cache)[:2],
        eps,
        values.scale,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        VALUE_HALF=value_dim // 2,
        BLOCK_VALUE_HALF=triton.next_power_of_2(max(1, value_dim // 2)),
        BLOCK_SIZE=sizes_of(kv_cache).block_size,
        HEADS=heads,
        HAS_NORM=q_weight is not None,
        NORM_VALUES=values.normed,
        SCALE_VALUES=values.scale != 1.0,
        KEEP_K=keep_k,
        FP8=kv_scales is not None,
        OVERLAP=supports_pdl(q.device),
        USE_PDL=use_pdl,
        num_warps=num_warps,
        **({"launch_pdl": True} if use_pdl else {}),
    )
    return q
