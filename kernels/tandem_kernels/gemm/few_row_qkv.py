"""Attention's front for few rows in one launch: norm, q, k and v, rotary embedding, KV cache.

    rows ─ RMSNorm ─ q, k, v, bias ─ rotation ─┬─▶ heads
                                               └─▶ k and v in their slots

A program has some outputs of the first half of a head and their partners in the second half, so it
rotates them by itself. No program knows a row's mean square before it has read the row, which it
does anyway: it multiplies by the norm's weight, sums up the squares beside the products, and scales
the products at the end. Numbers are rounded once, where three kernels round three times.

Weights, angles and slots are on their way before the kernel in front has ended (PDL). More rows,
which a norm of its own has normalised, are multiplied by matrix units (`few_row_warps`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from tandem_kernels.device import uses_pdl
from tandem_kernels.gemm.cache_lines import cache_lines
from tandem_kernels.gemm.few_row_gemm import (
    FewRowTuning,
    few_row_tuning,
    load_words,
    products_in_registers,
    word_places,
)
from tandem_kernels.gemm.few_row_warp_shapes import few_row_warp_tuning, takes_warps
from tandem_kernels.gemm.few_row_warps import run_few_row_qkv_by_warps


@triton.jit
def _angles(
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    pair: tl.tensor,
    row: tl.tensor,
    turned: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Returns cosines and sines [pairs, rows]; those of no rotation where nothing is `turned`."""
    position = tl.load(positions + row, mask=turned, other=0)
    place = cos_sin_cache + position[None, :] * (2 * HALF) + pair[:, None]
    cos = tl.load(place, mask=turned[None, :], other=1.0)
    return cos, tl.load(place + HALF, mask=turned[None, :], other=0.0)


@triton.jit
def _rotated(
    acc: tl.tensor, cos: tl.tensor, sin: tl.tensor, PAIRS: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Rotates [2 PAIRS, ROWS], of which the first half are the partners of the second."""
    first, second = tl.split(acc.reshape(2, PAIRS, ROWS).permute(1, 2, 0))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    return turned.permute(2, 0, 1).reshape(2 * PAIRS, ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def few_row_qkv_kernel(
    x: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    kv_cache: tl.tensor,
    slot_mapping: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    eps: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program j, of all rows PAIRS pairs of outputs: pairs j * PAIRS and on, counted
    through all heads, the query's first, then the keys', then the values'."""
    programs_of_head: tl.constexpr = HALF // PAIRS
    head = tl.program_id(0) // programs_of_head
    start = tl.program_id(0) % programs_of_head * PAIRS
    side = tl.arange(0, 2 * PAIRS)
    dim = start + side % PAIRS + side // PAIRS * HALF
    col = head * (2 * HALF) + dim
    pair = start + tl.arange(0, PAIRS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, DEPTH // 2)
    is_real = row < num_rows
    places = word_places(weight, col, INNER, lane)
    if OVERLAP:
        gdc_launch_dependents()
    ahead = load_words(places, lane, 0, DEPTH // 2, INNER)
    slot = tl.load(slot_mapping + row, mask=is_real & (head >= NUM_Q_HEADS), other=-1)
    added = 0.0
    if HAS_BIAS:
        added = tl.load(bias + col).to(tl.float32)[:, None]
    rotates = is_real & (head < NUM_Q_HEADS + NUM_KV_HEADS)
    cos, sin = _angles(positions, cos_sin_cache, pair, row, rotates, HALF)
    scales = None
    if HAS_NORM:
        scales = word_places(norm_weight, tl.zeros([1], tl.int32), 0, lane)
    inputs = word_places(x, tl.minimum(row, num_rows - 1), x_stride, lane)
    acc, squares = products_in_registers(
        ahead, places, inputs, scales, lane, 2 * PAIRS, ROWS, DEPTH // 2, INNER,
        weight.dtype.element_ty, HAS_NORM, OVERLAP,
    )  # fmt: skip
    if HAS_NORM:
        acc *= (1.0 / tl.sqrt_rn(squares / INNER + eps))[None, :]
    turned = _rotated(acc + added, cos, sin, PAIRS, ROWS).to(out.dtype.element_ty)
    to = out + row.to(tl.int64)[None, :] * out_stride + col[:, None]
    tl.store(to, turned, mask=is_real[None, :])
    if head >= NUM_Q_HEADS:
        line = cache_lines(
            kv_cache, slot, head, block_stride, value_stride,
            NUM_Q_HEADS, NUM_KV_HEADS, 2 * HALF, BLOCK_SIZE,
        )  # fmt: skip
        tl.store(line[None, :] + dim[:, None], turned, mask=(slot >= 0)[None, :])


def few_row_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `reference.gemm.few_row_qkv`; only for what `few_row_shapes.takes_heads` says."""
    heads = len(weight) // kv_cache.shape[-1], kv_cache.shape[-1]
    out = torch.empty(len(x), *heads, dtype=x.dtype, device=x.device)
    given = x, weight, bias, positions, cos_sin_cache, kv_cache, slot_mapping
    if takes_warps(x, weight) and norm_weight is None:
        of_warps = few_row_warp_tuning(x.device, *weight.shape)
        run_few_row_qkv_by_warps(*given, out, of_warps)
        return out
    run_few_row_qkv(*given, norm_weight, eps, out, few_row_tuning(x.device, len(x), len(weight)))
    return out


def run_few_row_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    out: Tensor,
    tuning: FewRowTuning,
) -> None:
    """Computes heads into `out` [T, Hq + 2 Hkv, D], and writes the cache."""
    num_rows, num_heads, head_dim = out.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    overlap = uses_pdl(x.device, num_rows)
    few_row_qkv_kernel[(len(weight) // tuning.cols,)](
        x,
        norm_weight,
        weight,
        bias,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        out,
        num_rows,
        x.stride(0),
        out.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        eps,
        NUM_Q_HEADS=num_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        ROWS=triton.next_power_of_2(num_rows),
        PAIRS=tuning.cols // 2,
        DEPTH=tuning.depth,
        INNER=weight.shape[1],
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        **tuning.options,
        **({"launch_pdl": True} if overlap else {}),
    )
