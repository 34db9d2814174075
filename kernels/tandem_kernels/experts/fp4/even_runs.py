"""Experts in four-bit floats, of few rows, by programs that all have the same to do.

All steps of the inner dimension of all tiles of outputs of all experts that have rows form one
line, which programs cut into equal runs, as those of `decode_attention` do with contexts:

    expert 0            expert 3            expert 5
    |tile 0  |tile 1  | |tile 0  |tile 1  | |tile 0  |tile 1  |
    |------------|------------|------------|------------|
       program 0    program 1    program 2    program 3

How many programs there are depends on the device alone, so all are in place at once, none begins
when others end, and every one reads the same number of bytes. One that has a whole tile writes it.
A cut one leaves its sums in its place 0 (a run that begins inside a tile) or 1 (that ends inside
one); the last program of a tile to arrive adds them, always in the order of the line.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import num_programs, uses_pdl
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.arrival_counts import arrival_counts
from tandem_kernels.experts.expert_outputs import write_pairs
from tandem_kernels.experts.expert_tuning import ExpertTuning
from tandem_kernels.gemm.fp4_numbers import NVFP4_TILE, tile_places
from tandem_kernels.gemm.fp4_products import operand_constants, products


@triton.jit
def _active(
    experts: tl.tensor, num_pairs: tl.tensor, PAIRS: tl.constexpr, GATED: tl.constexpr
) -> tl.tensor:
    """Returns the expert of each pair [PAIRS], -1 for none; the number of its expert among those
    that have rows, where a pair is the first of its expert, else -1; and how many those are.

    The second GEMM has waited for nothing yet, and reads past the SM's own cache, which may hold
    what was there before: programs that disagree about experts would leave counters behind.
    """
    pair = tl.arange(0, PAIRS)
    modifier: tl.constexpr = "" if GATED else ".cg"
    of_pair = tl.load(experts + pair, mask=pair < num_pairs, other=-1, cache_modifier=modifier)
    earlier = (of_pair[:, None] == of_pair[None, :]) & (pair[None, :] < pair[:, None])
    is_first = (of_pair >= 0) & (tl.sum(earlier.to(tl.int32), axis=1) == 0)
    rank = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    return of_pair, tl.where(is_first, rank, -1), tl.sum(is_first.to(tl.int32), axis=0)


@triton.jit
def _rows_of(
    of_pair: tl.tensor, expert: tl.tensor, num_pairs: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Returns the pairs of an expert in their order, [ROWS]: `num_pairs` for none."""
    pair = tl.arange(0, of_pair.shape[0])
    own = of_pair == expert
    place = tl.cumsum(own.to(tl.int32), axis=0) - 1
    is_row = own[None, :] & (place[None, :] == tl.arange(0, ROWS)[:, None])
    return num_pairs - tl.sum(tl.where(is_row, num_pairs - pair[None, :], 0), axis=1)


@triton.jit
def _sum_of_runs(
    sums: tl.tensor,
    lane: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Adds what runs `first` to `last` have left of a tile, in this order. Reads past the first
    cache: other programs wrote it."""
    total = tl.load(sums + (first * 2 + 1) * SIZE + lane, cache_modifier=".cg")
    for run in range(first + 1, last + 1):
        total += tl.load(sums + run * 2 * SIZE + lane, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["num_pairs", "num_tile_rows", "num_tile_columns"])
def fp4_even_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
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
    PAIRS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Computes one run of the line in each program; arguments are those of
    `fp4_expert_gemm_kernel`. No expert has more than ROWS rows."""
    kind: tl.constexpr = x.dtype.element_ty
    PIECE: tl.constexpr = DEPTH if BY_WARP else 64
    SIZE: tl.constexpr = COLS * ROWS * (2 if GATED else 1)
    if OVERLAP:
        if GATED:
            gdc_wait()
        gdc_launch_dependents()
    of_pair, number, num_active = _active(experts, num_pairs, PAIRS, GATED)
    steps = tl.cdiv(inner, DEPTH)
    col_tiles = tl.cdiv(num_outputs, COLS)
    length = num_active * col_tiles * steps
    run = tl.cdiv(length, tl.num_programs(0))
    program = tl.program_id(0)
    here = program * run
    end = tl.minimum(here + run, length)
    if OVERLAP and not GATED:
        gdc_wait()
    size = num_tile_rows.to(tl.int64) * num_tile_columns * TILE
    lane = tl.arange(0, PIECE)
    row = tl.arange(0, ROWS)
    while here < end:
        unit = here // steps
        first = here % steps
        last = tl.minimum(steps, first + end - here)
        expert = tl.max(tl.where(number == unit // col_tiles, of_pair, -1), axis=0)
        pair = _rows_of(of_pair, expert, num_pairs, ROWS)
        real = pair < num_pairs
        given = tl.where(real, pair // TOP_K if GATED else pair, 0).to(tl.int64)
        inputs = x + given[:, None] * x_stride + lane[None, :]
        part = expert.to(tl.int64) * (2 if GATED else 1)
        first_col = unit % col_tiles * COLS
        # Outputs behind the last tile are computed like those of the last, and not written.
        tile_row = first_col // 64 + tl.arange(0, COLS // 64)
        tile_row = tl.minimum(tile_row, num_tile_rows - 1)
        places = tile_places(weight + part * size, tile_row, num_tile_columns, PIECE // 64, TILE)
        acc, second, _, _, _, _, _, _ = products(
            inputs, inputs, real, places, size, 0, first, last, inner, num_tile_columns, kind,
            ROWS, 16, COLS // 64, DEPTH, PIECE, 1, 1, False, GATED, BY_WARP, EVEN, IN_PAIRS, WAITS,
            PRECISION, TILE,
        )  # fmt: skip
        if TILE == NVFP4_TILE:
            acc = acc * tl.load(factors + part)
            if GATED:
                second = second * tl.load(factors + part + 1)
        acc = acc.T
        second = second.T
        col = first_col + tl.arange(0, COLS)
        finishes = True
        if last - first < steps:
            place = row[:, None] * COLS + tl.arange(0, COLS)[None, :]
            own = sums + (program * 2 + (first == 0).to(tl.int32)).to(tl.int64) * SIZE + place
            tl.store(own, acc)
            if GATED:
                tl.store(own + ROWS * COLS, second)
            tl.debug_barrier()
            first_run = unit * steps // run
            last_run = (unit * steps + steps - 1) // run
            finishes = tl.atomic_add(arrived + unit, 1) == last_run - first_run
            if finishes:
                tl.store(arrived + unit, 0)
                acc = _sum_of_runs(sums, place, first_run, last_run, SIZE)
                if GATED:
                    place += ROWS * COLS
                    second = _sum_of_runs(sums, place, first_run, last_run, SIZE)
        if finishes:
            write_pairs(
                acc, second, pair, col, out, bias, part * num_outputs, pair_weights, num_pairs,
                num_outputs, limit, alpha, GATED, HAS_BIAS, GATE,
            )  # fmt: skip
        here += last - first


def fp4_even_gemm(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    experts: Tensor,
    out: Tensor,
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
    factors: Tensor | None = None,
) -> None:
    """Computes one of the two GEMMs; arguments are those of `fp4_expert_gemm`, for at most
    `tuning.rows` tokens. `tuning.runs`: programs of an SM."""
    num_pairs, num_outputs = out.shape
    _, num_parts, num_tile_rows, num_tile_columns, _ = weight.shape
    programs = num_programs(x.device, tuning.runs)
    size = programs * 2, num_parts * tuning.rows * tuning.cols
    overlap = uses_pdl(x.device)
    fp4_even_gemm_kernel[(programs,)](
        x,
        weight,
        factors,
        bias,
        pair_weights,
        experts,
        out,
        x.new_empty(size, dtype=torch.float32),
        arrival_counts(x.device),
        num_pairs,
        num_outputs,
        x.shape[1],
        x.stride(0),
        num_tile_rows,
        num_tile_columns,
        *gate_arguments(gate),
        TOP_K=experts.shape[1],
        ROWS=tuning.rows,
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        PAIRS=max(16, triton.next_power_of_2(num_pairs)),
        GATED=num_parts == 2,
        HAS_BIAS=bias is not None,
        GATE=gate_code(gate),
        EVEN=x.shape[1] % tuning.depth == 0,
        OVERLAP=overlap,
        **operand_constants(x, weight, tuning.num_warps),
        **tuning.options,
        **({"launch_pdl": True} if overlap else {}),
    )
