"""Experts whose weights are MXFP4, and stay so in memory (`mxfp4_tiles`).

    1. gate·up of each (token, expert) pair, bias, activation         [pairs, I]
    2. down, bias, times the pair's weight                            [pairs, H]
    3. the sum over a token's pairs                                   [T, H]

Weights become half precision in registers, in the order in which warps multiply from them there:
they are the first operand, and rows the second. Four warps multiply together, with rows in shared
memory; fewer multiply each by itself, which takes fewer instructions where rows are few. Where
there are few tiles, the inner dimension is split, too; and of few rows a tuning may ask that each
pair be computed by itself (`mxfp4_pairs`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import gpu_name
from tandem_kernels.elementwise.clamped_gate import ClampedGate
from tandem_kernels.experts.arrival_counts import MAX_TILES, arrival_counts
from tandem_kernels.experts.expert_outputs import write_pairs
from tandem_kernels.experts.expert_rows import ExpertRows, rows_of_program
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning, expert_tuning
from tandem_kernels.experts.fused_experts import sum_pairs
from tandem_kernels.experts.mxfp4_numbers import tile_places
from tandem_kernels.experts.mxfp4_pairs import mxfp4_pair_gemm, takes_each_pair
from tandem_kernels.experts.mxfp4_products import products

FORMAT = "mxfp4"
FIXED = ExpertTuning(rows=64, cols=64, depth=64, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""


@triton.jit
def _inputs(
    x: tl.tensor,
    pair: tl.tensor,
    num_pairs: tl.tensor,
    x_stride: tl.tensor,
    lane: tl.tensor,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
) -> tl.tensor:
    """Returns where the rows of pairs begin: addresses [ROWS, DEPTH]. Those of no pair are row 0's,
    and what is computed from it is not written."""
    row = pair
    if GATED:
        row = pair // TOP_K
    row = tl.where(pair < num_pairs, row, 0).to(tl.int64)
    return x + row[:, None] * x_stride + lane[None, :]


@triton.jit
def _sum_of_splits(
    place: tl.tensor, of_split: tl.tensor, written: tl.tensor, SPLITS: tl.constexpr
) -> tl.tensor:
    """Sums the parts that programs have written, in their order."""
    total = tl.load(place, mask=written, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(place + split * of_split, mask=written, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _write_strips(
    acc: tl.tensor,
    second: tl.tensor,
    next_acc: tl.tensor,
    next_second: tl.tensor,
    pair: tl.tensor,
    col: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    of_part: tl.tensor,
    pair_weights: tl.tensor,
    num_pairs: tl.tensor,
    num_outputs: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    STRIPS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
) -> None:
    """Writes [ROWS, COLS] of the outputs `col`, and of two strips those behind, [COLS, ROWS]."""
    write_pairs(
        acc, second, pair, col, out, bias, of_part, pair_weights, num_pairs, num_outputs,
        limit, alpha, GATED, HAS_BIAS, CLAMPED,
    )  # fmt: skip
    if STRIPS > 1:
        write_pairs(
            next_acc.T, next_second.T, pair, col + col.shape[0], out, bias, of_part, pair_weights,
            num_pairs, num_outputs, limit, alpha, GATED, HAS_BIAS, CLAMPED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_row_tiles", "num_tile_rows", "num_tile_columns"])
def mxfp4_expert_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    num_tile_rows: tl.tensor,
    num_tile_columns: tl.tensor,
    num_row_tiles: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BY_WARP: tl.constexpr,
    EXTRA: tl.constexpr,
    SPARES_EXTRA: tl.constexpr,
    UNROLL: tl.constexpr,
    STRIPS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    OVERLAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes one tile of pairs times one tile of outputs in each program.

    GATED: x [T, H], weight [E, 2, num_tile_rows, num_tile_columns, 544], activated. Else x
    [pairs, I], weight [E, 1, ...], times the pair's weight. Programs (i, s) compute part s of the
    inner dimension; the last of them to arrive sums the parts, in their order.
    """
    num_col_tiles = tl.cdiv(num_outputs, COLS)
    expert, pair, col_tile = rows_of_program(
        experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
        ROWS, GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, OVERLAP, ROWS + EXTRA,
    )  # fmt: skip
    if tl.min(pair, axis=0) >= num_pairs:
        return
    kind: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = COLS // STRIPS
    ROW_TILES: tl.constexpr = WIDTH // 64
    COLUMN_TILES: tl.constexpr = DEPTH // 64
    lane = tl.arange(0, DEPTH)
    inputs = _inputs(x, pair, num_pairs, x_stride, lane, TOP_K, GATED)
    part = expert.to(tl.int64) * 2 if GATED else expert.to(tl.int64)
    size = num_tile_rows.to(tl.int64) * num_tile_columns * 544
    # Outputs behind the last tile are computed like those of the last, and not written.
    row_tile = col_tile * (STRIPS * ROW_TILES) + tl.arange(0, ROW_TILES)
    tile_row = tl.minimum(row_tile, num_tile_rows - 1)
    next_row = tl.minimum(row_tile + ROW_TILES, num_tile_rows - 1)
    next_strip = ((next_row - tile_row) * num_tile_columns * 544)[:, None, None]
    places = tile_places(weight + part * size, tile_row, num_tile_columns, COLUMN_TILES)
    num_steps = tl.cdiv(inner, DEPTH)
    first = tl.program_id(1) * num_steps // SPLITS
    end = (tl.program_id(1) + 1) * num_steps // SPLITS
    pair2, inputs2, has_extra = pair, inputs, True
    if EXTRA > 0:
        _, pair2, _ = rows_of_program(
            experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
            EXTRA, GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, False, ROWS + EXTRA, ROWS,
        )  # fmt: skip
        inputs2 = _inputs(x, pair2, num_pairs, x_stride, lane, TOP_K, GATED)
    if SPARES_EXTRA:
        has_extra = tl.min(pair2, axis=0) < num_pairs
    if has_extra:
        acc, second, acc2, second2, next_acc, next_second, next_acc2, next_second2 = products(
            inputs, inputs2, places, size, next_strip, first, end, inner, num_tile_columns, kind,
            ROWS, EXTRA or 16, ROW_TILES, DEPTH, UNROLL, STRIPS, EXTRA > 0,
            GATED, BY_WARP, EVEN, IN_PAIRS, PRECISION,
        )  # fmt: skip
    else:
        acc, second, acc2, second2, next_acc, next_second, next_acc2, next_second2 = products(
            inputs, inputs2, places, size, next_strip, first, end, inner, num_tile_columns, kind,
            ROWS, EXTRA or 16, ROW_TILES, DEPTH, UNROLL, STRIPS, False,
            GATED, BY_WARP, EVEN, IN_PAIRS, PRECISION,
        )  # fmt: skip
    acc = acc.T
    second = second.T
    col = col_tile * COLS + tl.arange(0, WIDTH)
    if SPLITS > 1:
        width = 2 * num_outputs if GATED else num_outputs
        written = (pair < num_pairs)[:, None] & (col < num_outputs)[None, :]
        place = sums + pair.to(tl.int64)[:, None] * width + col[None, :]
        of_split = num_pairs.to(tl.int64) * width
        tl.store(place + tl.program_id(1) * of_split, acc, mask=written)
        if GATED:
            tl.store(place + tl.program_id(1) * of_split + num_outputs, second, mask=written)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tl.program_id(0), 1) < SPLITS - 1:
            return
        tl.store(arrived + tl.program_id(0), 0)
        acc = _sum_of_splits(place, of_split, written, SPLITS)
        if GATED:
            second = _sum_of_splits(place + num_outputs, of_split, written, SPLITS)
    of_part = part * num_outputs
    _write_strips(
        acc, second, next_acc, next_second, pair, col, out, bias, of_part, pair_weights,
        num_pairs, num_outputs, limit, alpha, STRIPS, GATED, HAS_BIAS, CLAMPED,
    )  # fmt: skip
    if EXTRA > 0:  # noqa: SIM102
        if has_extra:
            _write_strips(
                acc2.T, second2.T, next_acc2, next_second2, pair2, col, out, bias, of_part,
                pair_weights, num_pairs, num_outputs, limit, alpha,
                STRIPS, GATED, HAS_BIAS, CLAMPED,
            )  # fmt: skip


def mxfp4_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """See `reference.quantised_experts.mxfp4_experts`."""
    num_tokens, hidden_size = x.shape
    num_experts = len(w13)
    num_pairs = experts.numel()
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    shape = ExpertShape(num_experts, width, hidden_size, FORMAT)
    first, second = (
        FIXED if fixed_order else expert_tuning(shape, num_pairs, gpu_name(x.device), gated=gated)
        for gated in (True, False)
    )
    rows = ExpertRows.of(experts, num_experts)
    hidden = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    w2 = w2.unsqueeze(1)
    if takes_each_pair(first, num_pairs, width):
        mxfp4_pair_gemm(x, w13, weights, experts, hidden, first, bias=b13, gate=gate)
    else:
        mxfp4_gemm(x, w13, weights, rows, hidden, first, bias=b13, gate=gate)
    if takes_each_pair(second, num_pairs, hidden_size):
        mxfp4_pair_gemm(hidden, w2, weights, experts, out, second, bias=b2)
        return out
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    mxfp4_gemm(hidden, w2, weights, rows, parts, second, bias=b2)
    sum_pairs(parts, experts, out)
    return out


def mxfp4_gemm(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    rows: ExpertRows,
    out: Tensor,
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> None:
    """Computes one of the two GEMMs; the first where the weight has two parts.

    Args:
        x: [T, H], or [T * k, I].
        weight: [E, 2, ...] or [E, 1, ...] tiles. `tuning.cols` and `depth` are multiples of 64.
        pair_weights: [T, k].
        out: [T * k, I], or [T * k, H].
        bias: [E, 2 I], or [E, H]; None: none.
        gate: None: SiLU.
    """
    num_pairs, num_outputs = out.shape
    num_experts, num_parts, num_tile_rows, num_tile_columns, _ = weight.shape
    row_tiles, constants = rows.tiles(tuning.rows, tuning.extra_rows)
    num_tiles = row_tiles * triton.cdiv(num_outputs, tuning.cols)
    splits = tuning.splits if num_tiles <= MAX_TILES and tuning.strips == 1 else 1
    extra = tuning.extra_rows if rows.counts is not None else 0
    sums = None
    if splits > 1:
        sums = x.new_empty(splits, num_pairs, num_parts * num_outputs, dtype=torch.float32)
    mxfp4_expert_gemm_kernel[(num_tiles, splits)](
        x,
        weight,
        bias,
        pair_weights,
        rows.experts,
        rows.order,
        rows.counts,
        out,
        sums,
        arrival_counts(x.device) if splits > 1 else None,
        num_pairs,
        num_experts,
        num_outputs,
        x.shape[1],
        x.stride(0),
        num_tile_rows,
        num_tile_columns,
        row_tiles,
        *((gate.limit, gate.alpha) if gate is not None else (0.0, 0.0)),
        TOP_K=rows.experts.shape[1],
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        GROUP=tuning.group,
        SPLITS=splits,
        BY_WARP=tuning.num_warps < 4,
        EXTRA=extra,
        SPARES_EXTRA=tuning.spares_extra and extra > 0,
        UNROLL=tuning.unroll,
        STRIPS=tuning.strips,
        GATED=num_parts == 2,
        HAS_BIAS=bias is not None,
        CLAMPED=gate is not None,
        EVEN=x.shape[1] % tuning.depth == 0,
        IN_PAIRS=x.is_cuda and x.dtype == torch.bfloat16,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **constants,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **rows.launch,
    )
