"""Experts whose weights are four-bit floats, and stay so in memory (`gemm.fp4_tiles`).

    1. gate·up of each (token, expert) pair, bias, activation         [pairs, I]
    2. down, bias, times the pair's weight                            [pairs, H]
    3. the sum over a token's pairs                                   [T, H]

Weights become half precision in registers, in the order in which warps multiply from them there:
they are the first operand, and rows the second. Four warps multiply together, with rows in shared
memory; fewer multiply each by itself, which takes fewer instructions where rows are few. Where
there are few tiles, the inner dimension is split, too; and of few rows a tuning may ask that each
pair be computed by itself (`pairs`), or that programs share all tiles out evenly (`even_runs`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.arrival_counts import MAX_TILES, arrival_counts
from tandem_kernels.experts.expert_plan import ExpertPlan
from tandem_kernels.experts.expert_rows import ExpertRows, rows_of_program
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning
from tandem_kernels.experts.fp4.ahead_shapes import multiplies_ahead
from tandem_kernels.experts.fp4.even_runs import fp4_even_gemm
from tandem_kernels.experts.fp4.expert_tile import expert_tile
from tandem_kernels.experts.fp4.expert_tiles import ExpertTiles
from tandem_kernels.experts.fp4.experts_ahead import fp4_experts_ahead
from tandem_kernels.experts.fp4.few_rows.experts import fp4_few_row_gate_up
from tandem_kernels.experts.fp4.few_rows.shapes import expert_warp_tuning, takes_few_rows
from tandem_kernels.experts.fp4.pair_shapes import (
    format_of,
    takes_each_pair,
    takes_even_runs,
)
from tandem_kernels.experts.fp4.pairs import fp4_pair_gemm
from tandem_kernels.gemm.fp4_products import operand_constants

FIXED = ExpertTuning(rows=64, cols=64, depth=64, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""


@triton.jit(do_not_specialize=["num_pairs", "num_row_tiles", "num_tile_rows", "num_tile_columns"])
def fp4_expert_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
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
    HALF_LAST: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    OVERLAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Computes one tile of pairs times one tile of outputs in each program.

    GATED: x [T, H], weight [E, 2, num_tile_rows, num_tile_columns, TILE], activated. Else x
    [pairs, I], weight [E, 1, ...], times the pair's weight. Programs (i, s) compute part s of the
    inner dimension; the last of them to arrive sums the parts, in their order. HALF_LAST: there
    is half a tile in the last column, whose programs come last and compute no more than that.
    """
    num_col_tiles = tl.cdiv(num_outputs, COLS)
    expert, pair, col_tile = rows_of_program(
        experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
        ROWS, GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, OVERLAP, ROWS + EXTRA,
        LAST_APART=HALF_LAST,
    )  # fmt: skip
    if tl.min(pair, axis=0) >= num_pairs:
        return
    pair2 = pair
    if EXTRA > 0:
        _, pair2, _ = rows_of_program(
            experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
            EXTRA, GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, False, ROWS + EXTRA, ROWS,
            HALF_LAST,
        )  # fmt: skip
    if not HALF_LAST or col_tile < num_col_tiles - 1:
        expert_tile(
            x, weight, factors, bias, pair_weights, out, sums, arrived, expert, pair, pair2,
            col_tile * COLS, num_pairs, num_outputs, inner, x_stride, num_tile_rows,
            num_tile_columns, limit, alpha, TOP_K, ROWS, COLS, DEPTH, SPLITS, BY_WARP, EXTRA,
            SPARES_EXTRA, UNROLL, STRIPS,
            GATED, HAS_BIAS, GATE, EVEN, IN_PAIRS, WAITS, PRECISION, TILE,
        )  # fmt: skip
    else:
        expert_tile(
            x, weight, factors, bias, pair_weights, out, sums, arrived, expert, pair, pair2,
            col_tile * COLS, num_pairs, num_outputs, inner, x_stride, num_tile_rows,
            num_tile_columns, limit, alpha, TOP_K, ROWS, COLS // 2, DEPTH, SPLITS, BY_WARP,
            EXTRA, SPARES_EXTRA, UNROLL, STRIPS,
            GATED, HAS_BIAS, GATE, EVEN, IN_PAIRS, WAITS, PRECISION, TILE,
        )  # fmt: skip


def fp4_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
    summed: bool = True,
    f13: Tensor | None = None,
    f2: Tensor | None = None,
    ranks: int = 1,
) -> Tensor:
    """See `reference.quantised_experts.fp4_experts`."""
    num_tokens, hidden_size = x.shape
    num_experts = len(w13)
    num_pairs = experts.numel()
    if num_tokens == 0:
        return torch.empty_like(x)
    shape = ExpertShape(num_experts, width, hidden_size, format_of(w13))
    hidden = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    w2 = w2.unsqueeze(1)
    biased = b13 is not None or b2 is not None
    if not fixed_order and multiplies_ahead(x, w13, width, num_pairs, biased=biased, gate=gate):
        tiles = ExpertTiles.of(ExpertRows.of(experts, num_experts, searched=0))
        parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
        fp4_experts_ahead(x, w13, weights, tiles, hidden, gate)
        fp4_experts_ahead(hidden, w2, weights, tiles, parts)
        return sum_pairs(parts, experts) if summed else parts
    plan = ExpertPlan.of(experts, shape, FIXED if fixed_order else None, ranks)
    if takes_each_pair(plan.gate_up, num_pairs, width):
        fp4_pair_gemm(x, w13, weights, experts, hidden, plan.gate_up, b13, gate, factors=f13)
    else:
        multiply(x, w13, weights, plan.rows, hidden, plan.gate_up, b13, gate, f13)
    if takes_each_pair(plan.down, num_pairs, hidden_size):
        out = torch.empty_like(x)
        fp4_pair_gemm(hidden, w2, weights, experts, out, plan.down, b2, factors=f2)
        return out
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    multiply(hidden, w2, weights, plan.rows, parts, plan.down, b2, factors=f2)
    return sum_pairs(parts, experts) if summed else parts


def multiply(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    rows: ExpertRows,
    out: Tensor,
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
    factors: Tensor | None = None,
) -> None:
    """Computes one of the two GEMMs by even runs where a tuning asks for them and may, else by
    tiles; see `fp4_expert_gemm`. Of the first, warps multiply by themselves where it is faster."""
    num_outputs = out.shape[1]
    if tuning.runs and takes_few_rows(x, weight, rows.experts, num_outputs, gate):
        of_warps = expert_warp_tuning(x.device, num_outputs, x.shape[1])
        fp4_few_row_gate_up(x, weight, rows.experts, out, of_warps, bias, gate)
    elif takes_even_runs(tuning, len(pair_weights), *out.shape):
        fp4_even_gemm(x, weight, pair_weights, rows.experts, out, tuning, bias, gate, factors)
    else:
        fp4_expert_gemm(x, weight, pair_weights, rows, out, tuning, bias, gate, factors)


def fp4_expert_gemm(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    rows: ExpertRows,
    out: Tensor,
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
    factors: Tensor | None = None,
) -> None:
    """Computes one of the two GEMMs; the first where the weight has two parts.

    Args:
        x: [T, H], or [T * k, I].
        weight: [E, 2, ...] or [E, 1, ...] tiles. `tuning.cols` and `depth` are multiples of 64.
        pair_weights: [T, k].
        out: [T * k, I], or [T * k, H].
        bias: [E, 2 I], or [E, H]; None: none.
        gate: None: SiLU.
        factors: Of NVFP4: [E, 2] or [E] float32, as `fp4_experts` has them.
    """
    num_pairs, num_outputs = out.shape
    num_experts, num_parts, num_tile_rows, num_tile_columns, _ = weight.shape
    row_tiles, constants = rows.tiles(tuning.rows, tuning.extra_rows)
    num_tiles = row_tiles * triton.cdiv(num_outputs, tuning.cols)
    splits = tuning.splits if num_tiles <= MAX_TILES and tuning.strips == 1 else 1
    extra = tuning.extra_rows if rows.counts is not None else 0
    size = splits, num_pairs, num_parts * num_outputs
    sums = x.new_empty(size, dtype=torch.float32) if splits > 1 else None
    fp4_expert_gemm_kernel[(num_tiles, splits)](
        x,
        weight,
        factors,
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
        *gate_arguments(gate),
        TOP_K=rows.experts.shape[1],
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        GROUP=tuning.group,
        SPLITS=splits,
        EXTRA=extra,
        SPARES_EXTRA=tuning.spares_extra and extra > 0,
        UNROLL=tuning.unroll,
        STRIPS=tuning.strips,
        HALF_LAST=_halves_last(tuning, rows, num_tile_rows),
        GATED=num_parts == 2,
        HAS_BIAS=bias is not None,
        GATE=gate_code(gate),
        EVEN=x.shape[1] % tuning.depth == 0,
        **operand_constants(x, weight, tuning.num_warps),
        **constants,
        **tuning.options,
        **rows.launch,
    )


def _halves_last(tuning: ExpertTuning, rows: ExpertRows, num_tile_rows: int) -> bool:
    """Returns whether the last tiles of outputs are half empty, and computed as halves: of 2880
    outputs by 128 they are one tile of 23, and what comes last ends sooner."""
    tile_rows = tuning.cols // 64
    half = (
        tile_rows > 1 and num_tile_rows > tile_rows and num_tile_rows % tile_rows == tile_rows // 2
    )
    return half and rows.counts is not None and tuning.splits == tuning.strips == 1
