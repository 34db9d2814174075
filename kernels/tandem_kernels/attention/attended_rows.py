"""Makes of what heads have attended to what the output's projection reads.

    parts and their softmax states ─ sum ─┐
    rows ─────────────────────────────────┴─ rotate back ─┬─ half precision
                                                          └─ e4m3, of 128 numbers a scale

All of it is one launch, but for rows that stay in half precision: of these the last numbers turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.latent_tile import joined_parts
from tandem_kernels.attention.token_rows import BackTurn
from tandem_kernels.attention.turned_pairs import angles_from, pair_angles, turned_pairs
from tandem_kernels.gemm.fp8_library import ALIGNED_ROWS
from tandem_kernels.gemm.fp8_rows import fp8_scale
from tandem_kernels.reference.fp8 import BLOCK
from tandem_kernels.small_launches import in_turn, take_turn

_ROWS = 32
"""Heads of a program that rotates alone."""


@triton.jit(do_not_specialize=["scales_stride"])
def attended_rows_kernel(
    parts: tl.tensor,
    state: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    scales_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    QUANTISE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Makes, in program (i, j), WIDTH numbers of one head of one token, of which there are SPLITS
    parts. QUANTISE: they have a scale, of [H * D / WIDTH, scales_stride]."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    cos, sin = angles_from(cos_sin_cache, tl.load(positions + token), group * WIDTH, WIDTH, D, ROPE)
    at = row * D + group * WIDTH + tl.arange(0, WIDTH)
    if SPLITS > 1:
        joined = joined_parts(parts, state, row, group * WIDTH, D, WIDTH, SPLITS)
    else:
        joined = tl.load(parts + at).to(tl.float32)
    turned = turned_pairs(joined[None, :], cos[None, :], -sin[None, :], 1, WIDTH)
    if QUANTISE:
        scale = fp8_scale(tl.max(tl.abs(turned)))
        turned *= 1.0 / scale
        place = (head * (D // WIDTH) + group) * scales_stride + token
        tl.store(scales + place, scale)
    tl.store(out + at[None, :], turned.to(out.dtype.element_ty))


@triton.jit
def rotate_back_kernel(
    x: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Rotates, in program (t, i), the last numbers of tile i of the heads of token t."""
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = (head < NUM_HEADS)[:, None]
    cos, sin = pair_angles(cos_sin_cache, tl.load(positions + token), ROPE, ROPE)
    dim = D - ROPE + tl.arange(0, ROPE)
    place = x + (token * NUM_HEADS + head)[:, None] * D + dim[None, :]
    own = tl.load(place, mask=real, other=0.0).to(tl.float32)
    turned = turned_pairs(own, cos[None, :], -sin[None, :], ROWS, ROPE)
    tl.store(place, turned.to(x.dtype.element_ty), mask=real)


def finished_rows(
    parts: Tensor, state: Tensor | None, back: BackTurn, dtype: torch.dtype
) -> Tensor:
    """Returns rows [T, H, D] of `dtype` of their parts [T, H, S, D] and `state` [T, H, S, 2], or,
    without, of what they are, [T, H, D], in place."""
    if state is None:
        _rotate_back(parts, back)
        return parts
    num_tokens, num_heads, _, dim = parts.shape
    out = parts.new_empty(num_tokens, num_heads, dim, dtype=dtype)
    _finish(parts, state, back, out, None)
    return out


def quantised_rows(parts: Tensor, state: Tensor | None, back: BackTurn) -> tuple[Tensor, Tensor]:
    """Returns the same as e4m3 numbers [T, H * D] and their scales, as
    `reference.fp8.quantise_fp8` does."""
    num_tokens, num_heads, dim = parts.shape[0], parts.shape[1], parts.shape[-1]
    padded = -(-num_tokens // ALIGNED_ROWS) * ALIGNED_ROWS
    numbers = parts.new_empty(padded, num_heads * dim, dtype=torch.float8_e4m3fn)
    scales = parts.new_empty(num_heads * dim // BLOCK, padded, dtype=torch.float32)
    if num_tokens > 0:
        _finish(parts, state, back, numbers, scales)
    return numbers[:num_tokens], scales[:, :num_tokens]


def _finish(
    parts: Tensor, state: Tensor | None, back: BackTurn, out: Tensor, scales: Tensor | None
) -> None:
    num_tokens, num_heads, dim = parts.shape[0], parts.shape[1], parts.shape[-1]
    width, splits = min(BLOCK, dim), 1 if state is None else parts.shape[2]
    assert dim % width == 0, "programs have whole blocks of a head"
    attended_rows_kernel[(num_tokens * num_heads, dim // width)](
        parts,
        state,
        back.positions,
        back.cos_sin_cache,
        out,
        scales,
        0 if scales is None else scales.stride(0),
        NUM_HEADS=num_heads,
        D=dim,
        ROPE=back.cos_sin_cache.shape[1],
        WIDTH=width,
        SPLITS=splits,
        QUANTISE=scales is not None,
        num_warps=2 if splits > 8 else 1,
        **in_turn(parts.device, num_tokens),
    )


def _rotate_back(x: Tensor, back: BackTurn) -> None:
    num_tokens, num_heads, dim = x.shape
    if num_tokens == 0:
        return
    rows = min(_ROWS, triton.next_power_of_2(num_heads))
    rotate_back_kernel[(num_tokens, triton.cdiv(num_heads, rows))](
        x,
        back.positions,
        back.cos_sin_cache,
        NUM_HEADS=num_heads,
        ROWS=rows,
        D=dim,
        ROPE=back.cos_sin_cache.shape[1],
        num_warps=4,
        **in_turn(x.device, num_tokens),
    )
