"""GEMMs with four-bit floats (`fp4_tiles`), which become half precision in registers.

As in `int4_gemm`, a program reads a strip of weights once, starts before its predecessor has ended,
and brings its weights into the L2 cache while it waits for that; parts of the inner dimension are
summed by the last program to arrive, in their order. Many rows are faster by `fp4_dequantise` and
the library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.cache_lines import prefetch_lines
from tandem_kernels.device import supports_pdl
from tandem_kernels.gemm.fp4_numbers import NVFP4_TILE, tile_places
from tandem_kernels.gemm.fp4_products import operand_constants, products
from tandem_kernels.gemm.fp4_tiles import SIDE
from tandem_kernels.gemm.fp4_tuning import FIXED, Fp4Tuning, fp4_tuning
from tandem_kernels.part_sums import sum_of_parts
from tandem_kernels.stream_lanes import lane_counters

MAX_STRIPS = 1 << 14
"""More than GEMMs whose inner dimension is split have."""


@triton.jit
def _bring_into_cache(
    strip: tl.tensor, first: tl.tensor, end: tl.tensor, LINES: tl.constexpr, TILE: tl.constexpr
) -> None:
    """Prefetches the first LINES lines of tiles [first, end) of each row of tiles, which begin at
    `strip` [ROW_TILES]."""
    word = first * TILE + tl.arange(0, LINES) * 32
    word = tl.maximum(tl.minimum(word, end * TILE - 32), 0)
    prefetch_lines(strip[:, None] + word[None, :])


@triton.jit
def _scaled(
    acc: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    col: tl.tensor,
    real_col: tl.tensor,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns sums [ROWS, COLS] times the factors of the outputs `col`, with their bias."""
    if TILE == NVFP4_TILE:
        acc *= tl.load(factors + col, mask=real_col, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=real_col, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def fp4_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    num_tile_columns: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Computes, in program (i, j, s), tile i of outputs and j of rows over part s of the inner
    dimension. GATED: `weight` has twice as many outputs, the ups behind the gates."""
    ROW_TILES: tl.constexpr = COLS // 64
    COLUMN_TILES: tl.constexpr = DEPTH // 64
    PIECE: tl.constexpr = DEPTH if BY_WARP else 64
    kind: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    real_row, real_col = row < num_rows, col < num_outputs
    num_steps = tl.cdiv(num_tile_columns, COLUMN_TILES)
    first = tl.program_id(2) * num_steps // SPLITS
    end = (tl.program_id(2) + 1) * num_steps // SPLITS
    size = (num_outputs // 64).to(tl.int64) * num_tile_columns * TILE
    # Outputs behind the last tile are computed like those of the last, and not written.
    tile_row = tl.program_id(0) * ROW_TILES + tl.arange(0, ROW_TILES)
    tile_row = tl.minimum(tile_row, num_outputs // 64 - 1)
    if OVERLAP:
        gdc_launch_dependents()
        if AHEAD > 0:
            strip = weight + tile_row.to(tl.int64) * num_tile_columns * TILE
            last = tl.minimum(end * COLUMN_TILES, num_tile_columns)
            _bring_into_cache(strip, first * COLUMN_TILES, last, AHEAD, TILE)
            if GATED:
                _bring_into_cache(strip + size, first * COLUMN_TILES, last, AHEAD, TILE)
        gdc_wait()
    # Rows that there are not are row 0's, and what is computed from it is not written.
    inputs = x + tl.where(real_row, row, 0).to(tl.int64)[:, None] * x_stride
    inputs += tl.arange(0, PIECE)[None, :]
    places = tile_places(weight, tile_row, num_tile_columns, PIECE // 64, TILE)
    acc, second, _, _, _, _, _, _ = products(
        inputs, inputs, real_row, places, size, size, first, end, inner, num_tile_columns, kind,
        ROWS, 16, ROW_TILES, DEPTH, PIECE, 1, 1, False,
        GATED, BY_WARP, EVEN, IN_PAIRS, WAITS, PRECISION, TILE,
    )  # fmt: skip
    acc = acc.T
    second = second.T
    real = real_row[:, None] & real_col[None, :]
    if SPLITS > 1:
        width = 2 * num_outputs if GATED else num_outputs
        place = parts + row.to(tl.int64)[:, None] * width + col[None, :]
        apart = num_rows.to(tl.int64) * width
        tl.store(place + tl.program_id(2) * apart, acc, mask=real)
        if GATED:
            tl.store(place + tl.program_id(2) * apart + num_outputs, second, mask=real)
        tl.debug_barrier()
        counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1) < SPLITS - 1:
            return
        tl.store(counter, 0)
        acc = sum_of_parts(place, apart, real, SPLITS)
        if GATED:
            second = sum_of_parts(place + num_outputs, apart, real, SPLITS)
    acc = _scaled(acc, factors, bias, col, real_col, HAS_BIAS, TILE)
    if GATED:
        second = _scaled(second, factors, bias, num_outputs + col, real_col, False, TILE)
        gate = acc.to(kind).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * second.to(kind).to(tl.float32)
    to = out + row.to(tl.int64)[:, None] * num_outputs + col[None, :]
    tl.store(to, acc.to(kind), mask=real)


def fp4_gemm(
    x: Tensor,
    tiles: Tensor,
    factors: Tensor | None,
    bias: Tensor | None = None,
    fixed_order: bool = False,
) -> Tensor:
    """See `reference.fp4.fp4_gemm`."""
    out = torch.empty((x.shape[0], len(tiles) * SIDE), dtype=x.dtype, device=x.device)
    launch(x, tiles, factors, bias, out, FIXED if fixed_order else None, gated=False)
    return out


def fp4_gate_up(
    x: Tensor, tiles: Tensor, factors: Tensor | None, fixed_order: bool = False
) -> Tensor:
    """See `reference.fp4.fp4_gate_up`."""
    out = torch.empty((x.shape[0], len(tiles) * SIDE // 2), dtype=x.dtype, device=x.device)
    launch(x, tiles, factors, None, out, FIXED if fixed_order else None, gated=True)
    return out


def launch(
    x: Tensor,
    tiles: Tensor,
    factors: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tuning: Fp4Tuning | None,
    *,
    gated: bool,
) -> None:
    """Computes `out` [T, N], of tiles with N outputs, or with 2 N when `gated`.

    Args:
        tuning: None: the one of this shape.
    """
    num_rows, num_outputs = out.shape
    if num_rows == 0:
        return
    inner = x.shape[1]
    tuning = tuning or fp4_tuning(x.device, num_rows, num_outputs, inner, gated=gated)
    strips = triton.cdiv(num_outputs, tuning.cols), triton.cdiv(num_rows, tuning.rows)
    parts = arrived = None
    if tuning.splits > 1:
        size = tuning.splits, num_rows, len(tiles) * SIDE
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = _arrival_counts(x.device)
    overlap = supports_pdl(x.device)
    fp4_gemm_kernel[(*strips, tuning.splits)](
        x,
        tiles,
        factors,
        bias,
        out,
        parts,
        arrived,
        num_rows,
        num_outputs,
        inner,
        tiles.shape[1],
        x.stride(0),
        ROWS=tuning.rows,
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        SPLITS=tuning.splits,
        GATED=gated,
        HAS_BIAS=bias is not None,
        EVEN=inner % tuning.depth == 0,
        **operand_constants(x, tiles, tuning.num_warps),
        OVERLAP=overlap,
        AHEAD=tuning.ahead,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )


def _arrival_counts(device: torch.device) -> Tensor:
    """Returns a counter for each strip, zero between kernels of a lane."""
    return lane_counters("fp4_gemm", MAX_STRIPS, device)
