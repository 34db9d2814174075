"""Experts in four-bit floats, of few rows: every (token, expert) pair is computed by itself.

    1. gate·up, bias, activation          [pairs, I]
    2. down, bias, times the pair's weight, the sum over a token's pairs      [T, H]

Few rows seldom share an expert, so nothing looks for rows of the same one: a program's place in the
grid names its pair, its outputs and its part of the inner dimension. Parts are kept in float32.
The last program to arrive sums them, in the order of pairs and parts, whichever was first; in the
second GEMM it does so for all pairs of its token, which spares a launch and a rounding.

The row fills one of the columns that matrix units multiply at least. Both kernels are in place
before the ones in front have ended (PDL).

Two launches around them may be spared: programs of the first GEMM choose their token's experts by
themselves (`top_experts`), and the second GEMM adds its sums to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.arrival_counts import arrival_counts
from tandem_kernels.experts.expert_gate import activated
from tandem_kernels.experts.expert_tuning import ExpertTuning
from tandem_kernels.experts.fp4.late import late_products
from tandem_kernels.experts.fp4.pair_sums import added, sum_of_pairs
from tandem_kernels.experts.top_experts import expert_of_pair
from tandem_kernels.gemm.fp4_numbers import (
    NVFP4_TILE,
    fp4_weights,
    in_order_of_warps,
    tile_places,
)
from tandem_kernels.gemm.fp4_products import operand_constants
from tandem_kernels.gemm.fp4_tiles import TILE_WORDS
from tandem_kernels.part_sums import sum_of_parts
from tandem_kernels.small_launches import in_turn, take_turn


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Says how the first GEMM chooses experts; see `reference.experts.route_tokens`.

    Attributes:
        logits: [T, E] float32, contiguous.
        slot_mapping: [T] int64.
    """

    logits: Tensor
    slot_mapping: Tensor
    renormalise: bool
    scaling: float


@triton.jit
def _products(
    inputs: tl.tensor,
    weight: tl.tensor,
    tile_row: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    inner: tl.tensor,
    num_tile_columns: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns the sums of outputs over steps `first` to `end`, [COLS] float32, and those of the
    second part of the weight, which is `size` words further."""
    kind: tl.constexpr = inputs.dtype.element_ty
    COLUMN_TILES: tl.constexpr = DEPTH // 64
    lane = tl.arange(0, DEPTH)
    row = tl.arange(0, ROWS)
    inputs += (row * 0)[:, None] + lane[None, :]
    places = tile_places(weight, tile_row, num_tile_columns, COLUMN_TILES, TILE)
    acc = tl.zeros([COLS, ROWS], tl.float32)
    second = tl.zeros([COLS, ROWS], tl.float32)
    for step in range(first, end):
        inside = step * COLUMN_TILES + tl.arange(0, COLUMN_TILES) < num_tile_columns
        real = (row == 0)[:, None]
        if not EVEN:
            real &= (step * DEPTH + lane < inner)[None, :]
        given = tl.load(inputs + step * DEPTH, mask=real, other=0.0)
        if BY_WARP:
            given = in_order_of_warps(given)
        at = places + step * (COLUMN_TILES * TILE)
        by = fp4_weights(
            at, inside, kind, COLS // 64, COLUMN_TILES, BY_WARP, EVEN, IN_PAIRS, WAITS, TILE
        )
        acc = tl.dot(by, given.T, acc, input_precision=PRECISION)
        if GATED:
            by = fp4_weights(
                at + size,
                inside,
                kind,
                COLS // 64,
                COLUMN_TILES,
                BY_WARP,
                EVEN,
                IN_PAIRS,
                WAITS,
                TILE,
            )
            second = tl.dot(by, given.T, second, input_precision=PRECISION)
    # The other columns are zeros.
    sums = tl.sum(tl.where(row[None, :] == 0, acc, 0.0), axis=1)
    return sums, tl.sum(tl.where(row[None, :] == 0, second, 0.0), axis=1)


@triton.jit(do_not_specialize=["num_pairs", "num_tile_rows", "num_tile_columns"])
def fp4_pair_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    logits: tl.tensor,
    slot_mapping: tl.tensor,
    num_pairs: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    num_tile_rows: tl.tensor,
    num_tile_columns: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    scaling: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    WARPS: tl.constexpr,
    ADDS: tl.constexpr,
    LATE: tl.constexpr,
    UNROLL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Computes, in program (j, s, p), part s of outputs j * COLS and on of pair p.

    GATED: x [T, H], weight [E, 2, num_tile_rows, num_tile_columns, TILE], out [pairs, I]. Else x
    [pairs, I], weight [E, 1, ...], out [T, H]. `sums` [SPLITS, pairs, (2) outputs]. NUM_EXPERTS:
    experts are chosen here by `logits`; 0: they are given. ADDS: to what `out` has.
    """
    take_turn(OVERLAP)
    split, pair = tl.program_id(1), tl.program_id(2)
    expert = expert_of_pair(
        logits, slot_mapping, pair_weights, experts, pair, scaling,
        NUM_EXPERTS, LANES, TOP_K, RENORMALISE, WARPS,
    )  # fmt: skip
    exists = expert >= 0
    if GATED:  # noqa: SIM102
        if expert < 0:
            return
    row_of_x = pair // TOP_K if GATED else pair
    inputs = x + row_of_x.to(tl.int64) * x_stride
    part = tl.maximum(expert, 0).to(tl.int64) * (2 if GATED else 1)
    size = num_tile_rows.to(tl.int64) * num_tile_columns * TILE
    # Outputs behind the last tile are computed like those of the last, and not written.
    tile_row = tl.program_id(0) * (COLS // 64) + tl.arange(0, COLS // 64)
    tile_row = tl.minimum(tile_row, num_tile_rows - 1)
    num_steps = tl.cdiv(num_tile_columns, UNROLL) if LATE else tl.cdiv(inner, DEPTH)
    first = split * num_steps // SPLITS
    end = tl.where(exists, (split + 1) * num_steps // SPLITS, first)
    if LATE:
        gates, ups = late_products(
            inputs, weight + part * size, tile_row, size, first, end, inner, num_tile_columns,
            UNROLL, GATED, EVEN, IN_PAIRS, PRECISION,
        )  # fmt: skip
    else:
        gates, ups = _products(
            inputs, weight + part * size, tile_row, size, first, end, inner, num_tile_columns,
            ROWS, COLS, DEPTH, GATED, BY_WARP, EVEN, IN_PAIRS, WAITS, PRECISION, TILE,
        )  # fmt: skip
    if TILE == NVFP4_TILE:
        gates *= tl.load(factors + part)
        if GATED:
            ups *= tl.load(factors + part + 1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    real = col < num_outputs
    width = 2 * num_outputs if GATED else num_outputs
    place = sums + (split.to(tl.int64) * num_pairs + pair) * width + col
    tl.store(place, gates, mask=real & exists)
    if GATED:
        tl.store(place + num_outputs, ups, mask=real)
    tl.debug_barrier()
    row_of_out = pair if GATED else pair // TOP_K
    together: tl.constexpr = SPLITS if GATED else SPLITS * TOP_K
    counter = arrived + row_of_out * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(counter, 1) < together - 1:
        return
    tl.store(counter, 0)
    if GATED:
        place = sums + pair.to(tl.int64) * width + col
        apart = num_pairs.to(tl.int64) * width
        gates = sum_of_parts(place, apart, real, SPLITS)
        ups = sum_of_parts(place + num_outputs, apart, real, SPLITS)
        if HAS_BIAS:
            of_col = bias + expert.to(tl.int64) * width + col
            gates += tl.load(of_col, mask=real, other=0.0).to(tl.float32)
            ups += tl.load(of_col + num_outputs, mask=real, other=0.0).to(tl.float32)
        total = activated(gates, ups, limit, alpha, GATE)
    else:
        total = sum_of_pairs(
            sums, bias, pair_weights, experts, row_of_out, col, real, width, num_pairs,
            TOP_K, COLS, SPLITS, HAS_BIAS,
        )  # fmt: skip
    to = out + row_of_out.to(tl.int64) * num_outputs + col
    total = total.to(out.dtype.element_ty)
    if ADDS:
        total = added(to, total, real)
    tl.store(to, total, mask=real)


def fp4_pair_gemm(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    experts: Tensor,
    out: Tensor,
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
    choice: TokenChoice | None = None,
    *,
    adds: bool = False,
    factors: Tensor | None = None,
) -> None:
    """Computes one of the two GEMMs; the first where the weight has two parts.

    Args:
        x: [T, H], or [T * k, I].
        weight: [E, 2, ...] or [E, 1, ...] tiles.
        pair_weights, experts: [T, k]; an expert of -1 is none.
        out: [T * k, I], or [T, H], the sums over a token's pairs.
        bias: [E, 2 I], or [E, H]; None: none.
        gate: None: SiLU.
        choice: Of the first GEMM: by it `pair_weights` and `experts` are written; None: they are
            given.
        adds: Of the second GEMM: the sums are added to `out`.
        factors: Of NVFP4: [E, 2] or [E] float32, as `fp4_experts` has them.
    """
    num_tokens, top_k = experts.shape
    num_pairs, num_outputs = experts.numel(), out.shape[1]
    _, num_parts, num_tile_rows, num_tile_columns, tile_words = weight.shape
    inner = x.shape[1]
    size = tuning.splits, num_pairs, num_parts * num_outputs
    sums = torch.empty(size, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(num_outputs, tuning.cols), tuning.splits, num_pairs
    fp4_pair_gemm_kernel[grid](
        x,
        weight,
        factors,
        bias,
        pair_weights,
        experts,
        out,
        sums,
        arrival_counts(x.device),
        None if choice is None else choice.logits,
        None if choice is None else choice.slot_mapping,
        num_pairs,
        num_outputs,
        inner,
        x.stride(0),
        num_tile_rows,
        num_tile_columns,
        *gate_arguments(gate),
        1.0 if choice is None else choice.scaling,
        TOP_K=top_k,
        ROWS=tuning.rows,
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        SPLITS=tuning.splits,
        GATED=num_parts == 2,
        HAS_BIAS=bias is not None,
        GATE=gate_code(gate),
        **operand_constants(x, weight, tuning.num_warps),
        **_constants_of(choice),
        WARPS=tuning.num_warps,
        ADDS=adds,
        **_constants_of_turns(tuning, x, tile_words),
        **tuning.options,
        **in_turn(x.device, num_tokens),
    )


def _constants_of_turns(tuning: ExpertTuning, x: Tensor, tile_words: int) -> dict[str, int | bool]:
    """Returns how loops run. Half precision other than bfloat16 has no such small numbers as `late`
    multiplies, and NVFP4 has twice as many scales."""
    late = tuning.late and x.dtype != torch.float16 and tile_words == TILE_WORDS
    depth = tuning.depth * (tuning.unroll if late else 1)
    return {"LATE": late, "UNROLL": tuning.unroll, "EVEN": x.shape[1] % depth == 0}


def _constants_of(choice: TokenChoice | None) -> dict[str, int | bool]:
    num_experts = 0 if choice is None else choice.logits.shape[1]
    return {
        "NUM_EXPERTS": num_experts,
        "LANES": triton.next_power_of_2(max(1, num_experts)),
        "RENORMALISE": choice is not None and choice.renormalise,
    }
