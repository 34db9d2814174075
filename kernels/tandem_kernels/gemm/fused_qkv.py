"""Fused q, k and v: their GEMM of many rows, the rotary embedding, and the write into the paged KV
cache.

By itself the kernel behind the GEMM moves bytes alone, all of which the GEMM has just written: for
8192 tokens of Llama-3.1-8B 217 MB a layer.

Programs and tiles are those of `fused_gate_up`. The outputs of a tile are heads of one kind:
queries, keys or values. They are rounded as a GEMM alone rounds them, in the registers that summed
them, where a thread has pairs of neighbours. Then they go through shared memory, a quarter of a
tile at a time, so that a thread has eight neighbours. With these, cosines and sines are read, and
lines of heads and of the cache written, by whole vectors, 128 bytes side by side; pairs would fill
half of a sector each. The copy engine cannot write lines that lie apart, as a token's slots do.

Masks tell the kinds apart: with a branch behind the inner loop Triton 3.6 and 3.7 cannot make both
loops one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem_kernels.device import has_copy_engine, num_programs
from tandem_kernels.gemm.fused_tuning import fused_tuning
from tandem_kernels.gemm.persistent_tiles import place_of_tile, rounded


@triton.jit
def _halves(
    sums: tl.tensor,
    bias: tl.tensor,
    col: tl.tensor,
    kind: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Returns the first and second halves [ROWS, HEADS, HALF] of heads whose outputs begin at
    `col`, as float32 numbers that are rounded."""
    heads = sums.reshape(sums.shape[0], HEADS, 2, HALF)
    first, second = tl.split(heads.permute(0, 1, 3, 2))
    if HAS_BIAS:
        head = tl.arange(0, HEADS)[:, None] * (2 * HALF)
        at = bias + col + head + tl.arange(0, HALF)[None, :]
        first += tl.load(at).to(tl.float32)[None]
        second += tl.load(at + HALF).to(tl.float32)[None]
    first = rounded(first, kind, IN_PAIRS).to(tl.float32)
    return first, rounded(second, kind, IN_PAIRS).to(tl.float32)


@triton.jit
def _store(
    to: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> None:
    kind: tl.constexpr = to.dtype.element_ty
    tl.store(to, rounded(first, kind, IN_PAIRS), mask=inside)
    tl.store(to + HALF, rounded(second, kind, IN_PAIRS), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def fused_qkv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    kv_cache: tl.tensor,
    slot_mapping: tl.tensor,
    heads: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES_DOWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_KV: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> None:
    """Descriptors of x [T, K] and weight [(Hq + 2 Hkv) D, K]. What lies behind row T reads as zero
    and is not written. Of a tile, the left heads are finished before the right ones."""
    HEAD: tl.constexpr = 2 * HALF
    LINES: tl.constexpr = BLOCK_SIZE * HEAD
    WIDTH: tl.constexpr = (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD
    HEADS: tl.constexpr = COLS // 2 // HEAD
    across: tl.constexpr = WIDTH // COLS
    kind: tl.constexpr = heads.dtype.element_ty
    down = tl.cdiv(num_rows, ROWS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, col = place_of_tile(tile, down, across, ROWS, COLS, TILES_DOWN)
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for step in range(tl.cdiv(inner, DEPTH)):
            given = x.load([row, step * DEPTH])
            sums = tl.dot(given, weight.load([col, step * DEPTH]).T, sums)

        token = row + tl.arange(0, ROWS)
        inside = token < num_rows
        head = col // HEAD
        is_query = head < NUM_Q_HEADS
        is_value = head >= NUM_Q_HEADS + NUM_KV_HEADS
        lane = tl.arange(0, HEADS)[None, :, None]
        half = tl.arange(0, HALF)[None, None, :]

        position = tl.load(positions + token, mask=inside, other=0)
        angle = cos_sin_cache + position[:, None, None] * HEAD + (half + 0 * lane)
        turns = (inside & (head < NUM_Q_HEADS + NUM_KV_HEADS))[:, None, None]
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + HALF, mask=turns, other=0.0)

        slot = tl.load(slot_mapping + token, mask=inside, other=-1)
        line = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD
        line += is_value * value_stride + (head - NUM_Q_HEADS) % NUM_KV_HEADS * LINES
        to_cache = kv_cache + line[:, None, None] + lane * LINES + half
        to_heads = heads + token.to(tl.int64)[:, None, None] * WIDTH + col + lane * HEAD + half
        in_cache = ((slot >= 0) & (head >= NUM_Q_HEADS))[:, None, None]
        in_heads = (inside & (is_query | KEEP_KV))[:, None, None]

        left, right = tl.split(sums.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1))
        for side in tl.static_range(2):
            first, second = _halves(
                left if side == 0 else right, bias, col + side * (COLS // 2),
                kind, HEADS, HALF, HAS_BIAS, IN_PAIRS,
            )  # fmt: skip
            turned = tl.where(is_value, first, first * cos - second * sin)
            second = tl.where(is_value, second, second * cos + first * sin)
            _store(to_heads + side * (COLS // 2), turned, second, in_heads, HALF, IN_PAIRS)
            _store(to_cache + side * HEADS * LINES, turned, second, in_cache, HALF, IN_PAIRS)


def fused_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    keep_kv: bool = False,
) -> Tensor:
    """See `reference.gemm.fused_qkv`; only for what `fused_qkv_shapes.takes` says."""
    num_rows, inner = x.shape
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    num_heads = len(weight) // head_dim
    heads = torch.empty((num_rows, num_heads, head_dim), dtype=x.dtype, device=x.device)
    tuning = fused_tuning(x.device, gated=False)
    fused_qkv_kernel[(num_programs(x.device, 1),)](
        TensorDescriptor.from_tensor(x, [tuning.rows, tuning.depth]),
        TensorDescriptor.from_tensor(weight, [tuning.cols, tuning.depth]),
        bias,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        heads,
        num_rows,
        inner,
        kv_cache.stride(0),
        kv_cache.stride(1),
        NUM_Q_HEADS=num_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        **tuning.sizes,
        HAS_BIAS=bias is not None,
        KEEP_KV=keep_kv,
        IN_PAIRS=x.dtype == torch.bfloat16 and has_copy_engine(x.device),
        **tuning.options,
    )
    return heads
