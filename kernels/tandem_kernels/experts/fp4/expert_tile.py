"""One tile of a GEMM of experts in four-bit floats: pairs times outputs, from the inputs to what is
written."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.experts.expert_outputs import write_pairs
from tandem_kernels.gemm.fp4_numbers import NVFP4_TILE, tile_places
from tandem_kernels.gemm.fp4_products import products
from tandem_kernels.part_sums import sum_of_parts


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
    """Returns where the rows of pairs begin: addresses [ROWS, PIECE]. Those of no pair are row 0's,
    and what is computed from it is not written."""
    row = pair
    if GATED:
        row = pair // TOP_K
    row = tl.where(pair < num_pairs, row, 0).to(tl.int64)
    return x + row[:, None] * x_stride + lane[None, :]


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
    GATE: tl.constexpr,
) -> None:
    """Writes [ROWS, COLS] of the outputs `col`, and of two strips those behind, [COLS, ROWS]."""
    write_pairs(
        acc, second, pair, col, out, bias, of_part, pair_weights, num_pairs, num_outputs,
        limit, alpha, GATED, HAS_BIAS, GATE,
    )  # fmt: skip
    if STRIPS > 1:
        write_pairs(
            next_acc.T, next_second.T, pair, col + col.shape[0], out, bias, of_part, pair_weights,
            num_pairs, num_outputs, limit, alpha, GATED, HAS_BIAS, GATE,
        )  # fmt: skip


@triton.jit
def expert_tile(
    x: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    expert: tl.tensor,
    pair: tl.tensor,
    pair2: tl.tensor,
    first_col: tl.tensor,
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
    BY_WARP: tl.constexpr,
    EXTRA: tl.constexpr,
    SPARES_EXTRA: tl.constexpr,
    UNROLL: tl.constexpr,
    STRIPS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Computes outputs `first_col` and on, COLS of them, of `pair` [ROWS], and of `pair2` [EXTRA],
    in part `program_id(1)` of the inner dimension. Other arguments are those of the kernel."""
    kind: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = COLS // STRIPS
    ROW_TILES: tl.constexpr = WIDTH // 64
    PIECE: tl.constexpr = DEPTH if BY_WARP else 64
    lane = tl.arange(0, PIECE)
    inputs = _inputs(x, pair, num_pairs, x_stride, lane, TOP_K, GATED)
    part = expert.to(tl.int64) * 2 if GATED else expert.to(tl.int64)
    size = num_tile_rows.to(tl.int64) * num_tile_columns * TILE
    # Outputs behind the last tile are computed like those of the last, and not written.
    row_tile = first_col // 64 + tl.arange(0, ROW_TILES)
    tile_row = tl.minimum(row_tile, num_tile_rows - 1)
    next_row = tl.minimum(row_tile + ROW_TILES, num_tile_rows - 1)
    next_strip = ((next_row - tile_row) * num_tile_columns * TILE)[:, None, None]
    places = tile_places(weight + part * size, tile_row, num_tile_columns, PIECE // 64, TILE)
    num_steps = tl.cdiv(inner, DEPTH)
    first = tl.program_id(1) * num_steps // SPLITS
    end = (tl.program_id(1) + 1) * num_steps // SPLITS
    inputs2, has_extra = inputs, True
    if EXTRA > 0:
        inputs2 = _inputs(x, pair2, num_pairs, x_stride, lane, TOP_K, GATED)
    if SPARES_EXTRA:
        has_extra = tl.min(pair2, axis=0) < num_pairs
    if has_extra:
        acc, second, acc2, second2, next_acc, next_second, next_acc2, next_second2 = products(
            inputs, inputs2, pair < num_pairs, places, size, next_strip, first, end, inner,
            num_tile_columns, kind, ROWS, EXTRA or 16, ROW_TILES, DEPTH, PIECE, UNROLL, STRIPS,
            EXTRA > 0, GATED, BY_WARP, EVEN, IN_PAIRS, WAITS, PRECISION, TILE,
        )  # fmt: skip
    else:
        acc, second, acc2, second2, next_acc, next_second, next_acc2, next_second2 = products(
            inputs, inputs2, pair < num_pairs, places, size, next_strip, first, end, inner,
            num_tile_columns, kind, ROWS, EXTRA or 16, ROW_TILES, DEPTH, PIECE, UNROLL, STRIPS,
            False, GATED, BY_WARP, EVEN, IN_PAIRS, WAITS, PRECISION, TILE,
        )  # fmt: skip
    if TILE == NVFP4_TILE:
        factor = tl.load(factors + part)
        acc, acc2, next_acc, next_acc2 = (
            acc * factor, acc2 * factor, next_acc * factor, next_acc2 * factor,
        )  # fmt: skip
        if GATED:
            factor = tl.load(factors + part + 1)
            second, second2, next_second, next_second2 = (
                second * factor, second2 * factor, next_second * factor, next_second2 * factor,
            )  # fmt: skip
    acc = acc.T
    second = second.T
    col = first_col + tl.arange(0, WIDTH)
    finishes = True
    if SPLITS > 1:
        width = 2 * num_outputs if GATED else num_outputs
        written = (pair < num_pairs)[:, None] & (col < num_outputs)[None, :]
        place = sums + pair.to(tl.int64)[:, None] * width + col[None, :]
        of_split = num_pairs.to(tl.int64) * width
        tl.store(place + tl.program_id(1) * of_split, acc, mask=written)
        if GATED:
            tl.store(place + tl.program_id(1) * of_split + num_outputs, second, mask=written)
        tl.debug_barrier()
        finishes = tl.atomic_add(arrived + tl.program_id(0), 1) == SPLITS - 1
        if finishes:
            tl.store(arrived + tl.program_id(0), 0)
            acc = sum_of_parts(place, of_split, written, SPLITS)
            if GATED:
                second = sum_of_parts(place + num_outputs, of_split, written, SPLITS)
    of_part = part * num_outputs
    if finishes:
        _write_strips(
            acc, second, next_acc, next_second, pair, col, out, bias, of_part, pair_weights,
            num_pairs, num_outputs, limit, alpha, STRIPS, GATED, HAS_BIAS, GATE,
        )  # fmt: skip
        if EXTRA > 0:  # noqa: SIM102
            if has_extra:
                _write_strips(
                    acc2.T, second2.T, next_acc2, next_second2, pair2, col, out, bias, of_part,
                    pair_weights, num_pairs, num_outputs, limit, alpha,
                    STRIPS, GATED, HAS_BIAS, GATE,
                )  # fmt: skip
