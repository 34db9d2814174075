"""MXFP4 experts of few rows: every (token, expert) pair is computed by itself.

    1. gate·up, bias, activation          [pairs, I]
    2. down, bias, times the pair's weight, the sum over a token's pairs      [T, H]

Few rows seldom share an expert, so nobody looks for rows of the same one: a program's place in the
grid names its pair, its outputs and its part of the inner dimension. Parts are kept in float32.
The last program to arrive sums them, in the order of pairs and parts, whichever was first; in the
second GEMM it does so for all pairs of its token, which spares a launch and a rounding.

The row fills one of the columns that matrix units multiply at least. Both kernels are in place
before the ones in front have ended (PDL).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.elementwise.clamped_gate import ClampedGate
from tandem_kernels.experts.arrival_counts import MAX_TILES, arrival_counts
from tandem_kernels.experts.expert_gate import activated
from tandem_kernels.experts.expert_tuning import ExpertTuning
from tandem_kernels.experts.mxfp4_numbers import in_order_of_warps, mxfp4_weights, tile_places


@triton.jit
def _sum_of_parts(
    sums: tl.tensor,
    pair: tl.tensor,
    col: tl.tensor,
    real: tl.tensor,
    width: tl.tensor,
    num_pairs: tl.tensor,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Sums the parts of a pair's outputs in their order."""
    place = sums + pair.to(tl.int64) * width + col
    total = tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
    for _ in tl.static_range(1, SPLITS):
        place += num_pairs.to(tl.int64) * width
        total += tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _sum_of_pairs(
    sums: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    token: tl.tensor,
    col: tl.tensor,
    real: tl.tensor,
    width: tl.tensor,
    num_pairs: tl.tensor,
    TOP_K: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Sums the outputs of a token's pairs in their order, each by its weight."""
    total = tl.zeros([COLS], tl.float32)
    for other in tl.static_range(TOP_K):
        mate = token * TOP_K + other
        of = tl.load(experts + mate)
        counts = real & (of >= 0)
        outputs = _sum_of_parts(sums, mate, col, counts, width, num_pairs, SPLITS)
        if HAS_BIAS:
            of_col = bias + of.to(tl.int64) * width + col
            outputs += tl.load(of_col, mask=counts, other=0.0).to(tl.float32)
        total += outputs * tl.load(pair_weights + mate)
    return total


@triton.jit(do_not_specialize=["num_pairs", "num_tile_rows", "num_tile_columns"])
def mxfp4_pair_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    num_pairs: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    num_tile_rows: tl.tensor,
    num_tile_columns: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (j, s, p), part s of outputs j * COLS and on of pair p.

    GATED: x [T, H], weight [E, 2, num_tile_rows, num_tile_columns, 544], out [pairs, I]. Else x
    [pairs, I], weight [E, 1, ...], out [T, H]. `sums` [SPLITS, pairs, (2) outputs].
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    split, pair = tl.program_id(1), tl.program_id(2)
    expert = tl.load(experts + pair)
    exists = expert >= 0
    if GATED:  # noqa: SIM102
        if expert < 0:
            return
    kind: tl.constexpr = x.dtype.element_ty
    COLUMN_TILES: tl.constexpr = DEPTH // 64
    lane = tl.arange(0, DEPTH)
    row = tl.arange(0, ROWS)
    row_of_x = pair // TOP_K if GATED else pair
    inputs = x + row_of_x.to(tl.int64) * x_stride + (row * 0)[:, None] + lane[None, :]
    part = tl.maximum(expert, 0).to(tl.int64) * (2 if GATED else 1)
    size = num_tile_rows.to(tl.int64) * num_tile_columns * 544
    # Outputs behind the last tile are computed like those of the last, and not written.
    tile_row = tl.program_id(0) * (COLS // 64) + tl.arange(0, COLS // 64)
    tile_row = tl.minimum(tile_row, num_tile_rows - 1)
    places = tile_places(weight + part * size, tile_row, num_tile_columns, COLUMN_TILES)
    acc = tl.zeros([COLS, ROWS], tl.float32)
    second = tl.zeros([COLS, ROWS], tl.float32)
    num_steps = tl.cdiv(inner, DEPTH)
    first = split * num_steps // SPLITS
    end = tl.where(exists, (split + 1) * num_steps // SPLITS, first)
    for step in range(first, end):
        inside = step * COLUMN_TILES + tl.arange(0, COLUMN_TILES) < num_tile_columns
        if EVEN:
            given = tl.load(inputs + step * DEPTH)
        else:
            real_k = (step * DEPTH + lane < inner)[None, :]
            given = tl.load(inputs + step * DEPTH, mask=real_k, other=0.0)
        if BY_WARP:
            given = in_order_of_warps(given)
        at = places + step * (COLUMN_TILES * 544)
        by = mxfp4_weights(at, inside, kind, COLS // 64, COLUMN_TILES, BY_WARP, EVEN, IN_PAIRS)
        acc = tl.dot(by, given.T, acc, input_precision=PRECISION)
        if GATED:
            by = mxfp4_weights(
                at + size, inside, kind, COLS // 64, COLUMN_TILES, BY_WARP, EVEN, IN_PAIRS
            )
            second = tl.dot(by, given.T, second, input_precision=PRECISION)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    real = col < num_outputs
    width = 2 * num_outputs if GATED else num_outputs
    place = sums + (split.to(tl.int64) * num_pairs + pair) * width + col
    # All columns are the same.
    tl.store(place, tl.sum(tl.where(row[None, :] == 0, acc, 0.0), axis=1), mask=real & exists)
    if GATED:
        ups = tl.sum(tl.where(row[None, :] == 0, second, 0.0), axis=1)
        tl.store(place + num_outputs, ups, mask=real)
    tl.debug_barrier()
    row_of_out = pair if GATED else pair // TOP_K
    together: tl.constexpr = SPLITS if GATED else SPLITS * TOP_K
    counter = arrived + row_of_out * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(counter, 1) < together - 1:
        return
    tl.store(counter, 0)
    if GATED:
        gates = _sum_of_parts(sums, pair, col, real, width, num_pairs, SPLITS)
        ups = _sum_of_parts(sums, pair, num_outputs + col, real, width, num_pairs, SPLITS)
        if HAS_BIAS:
            of_col = bias + expert.to(tl.int64) * width + col
            gates += tl.load(of_col, mask=real, other=0.0).to(tl.float32)
            ups += tl.load(of_col + num_outputs, mask=real, other=0.0).to(tl.float32)
        total = activated(gates, ups, limit, alpha, CLAMPED)
    else:
        total = _sum_of_pairs(
            sums, bias, pair_weights, experts, row_of_out, col, real, width, num_pairs,
            TOP_K, COLS, SPLITS, HAS_BIAS,
        )  # fmt: skip
    to = out + row_of_out.to(tl.int64) * num_outputs + col
    tl.store(to, total.to(out.dtype.element_ty), mask=real)


def takes_each_pair(tuning: ExpertTuning, num_pairs: int, num_outputs: int) -> bool:
    """Returns whether a GEMM runs as this tuning asks: there are counters for so many tiles."""
    return tuning.each_pair and num_pairs * triton.cdiv(num_outputs, tuning.cols) <= MAX_TILES


def mxfp4_pair_gemm(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    experts: Tensor,
    out: Tensor,
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> None:
    """Computes one of the two GEMMs; the first where the weight has two parts.

    Args:
        x: [T, H], or [T * k, I].
        weight: [E, 2, ...] or [E, 1, ...] tiles.
        pair_weights, experts: [T, k]; an expert of -1 is none.
        out: [T * k, I], or [T, H], the sums over a token's pairs.
        bias: [E, 2 I], or [E, H]; None: none.
        gate: None: SiLU.
    """
    num_tokens, top_k = experts.shape
    num_pairs, num_outputs = experts.numel(), out.shape[1]
    _, num_parts, num_tile_rows, num_tile_columns, _ = weight.shape
    inner = x.shape[1]
    size = tuning.splits, num_pairs, num_parts * num_outputs
    sums = torch.empty(size, dtype=torch.float32, device=x.device)
    overlap = uses_pdl(x.device, num_tokens)
    grid = triton.cdiv(num_outputs, tuning.cols), tuning.splits, num_pairs
    mxfp4_pair_gemm_kernel[grid](
        x,
        weight,
        bias,
        pair_weights,
        experts,
        out,
        sums,
        arrival_counts(x.device),
        num_pairs,
        num_outputs,
        inner,
        x.stride(0),
        num_tile_rows,
        num_tile_columns,
        *((gate.limit, gate.alpha) if gate is not None else (0.0, 0.0)),
        TOP_K=top_k,
        ROWS=tuning.rows,
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        SPLITS=tuning.splits,
        GATED=num_parts == 2,
        HAS_BIAS=bias is not None,
        CLAMPED=gate is not None,
        BY_WARP=tuning.num_warps < 4,
        EVEN=inner % tuning.depth == 0,
        IN_PAIRS=x.is_cuda and x.dtype == torch.bfloat16,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )
