"""The experts' feed-forward blocks, for all tokens of a step.

    1. gate·up of each (token, expert) pair, bias, activation         [pairs, I]
    2. down, bias, times the pair's weight                            [pairs, H]
    3. the sum over a token's pairs                                   [T, H]

Grids depend on shapes alone, so all of it can be recorded: programs without work end at once. With
few pairs a program reads the experts of all of them and finds its own; with many they are sorted
first (`expert_rows`). One token has kernels of its own (`one_row_experts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import shared_bytes
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.expert_gate import activated
from tandem_kernels.experts.expert_outputs import write_pairs
from tandem_kernels.experts.expert_plan import ExpertPlan
from tandem_kernels.experts.expert_rows import ExpertRows, rows_of_program
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import FIXED, ExpertShape, ExpertTuning
from tandem_kernels.experts.one_row_experts import SharedWeights, one_row_experts, takes_one_row
from tandem_kernels.product_precision import precision_of


@triton.jit
def _products(
    inputs: tl.tensor,
    real: tl.tensor,
    places: tl.tensor,
    up: tl.tensor,
    real_col: tl.tensor,
    inner: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_UP: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Returns sums [ROWS, COLS] of `inputs` [ROWS] of numbers, where `real`, times the weights at
    `places` [COLS], and, HAS_UP, those that lie `up` behind them."""
    lane = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    second = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, inner, DEPTH):
        k = start + lane
        if EVEN:
            given = tl.load(inputs + k[None, :], mask=real[:, None], other=0.0)
            by = tl.load(places + k[:, None])
        else:
            real_k = k < inner
            given = tl.load(inputs + k[None, :], mask=real[:, None] & real_k[None, :], other=0.0)
            inside = real_k[:, None] & real_col[None, :]
            by = tl.load(places + k[:, None], mask=inside, other=0.0)
        acc = tl.dot(given, by, acc, input_precision=PRECISION)
        if HAS_UP:
            if EVEN:
                by = tl.load(places + up + k[:, None])
            else:
                by = tl.load(places + up + k[:, None], mask=inside, other=0.0)
            second = tl.dot(given, by, second, input_precision=PRECISION)
    return acc, second


@triton.jit
def _shared_tile(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes what the shared expert gives to all tokens, outputs `program * COLS` and on."""
    if OVERLAP:
        if GATED:
            gdc_wait()
            gdc_launch_dependents()
        else:
            gdc_launch_dependents()
            gdc_wait()
    HAS_UP: tl.constexpr = GATED and GATE != 4
    row = tl.arange(0, ROWS)
    real = row < num_tokens
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    real_col = col < num_outputs
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    places = weight + col.to(tl.int64)[None, :] * inner
    acc, second = _products(
        inputs, real, places, num_outputs.to(tl.int64) * inner, real_col, inner,
        ROWS, COLS, DEPTH, HAS_UP, EVEN, PRECISION,
    )  # fmt: skip
    if GATED:
        acc = activated(acc, second, limit, alpha, GATE)
    to = out + row.to(tl.int64)[:, None] * num_outputs + col[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & real_col[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_row_tiles"])
def expert_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    shared_x: tl.tensor,
    shared_weight: tl.tensor,
    shared_out: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    num_row_tiles: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    shared_outputs: tl.tensor,
    shared_inner: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
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
    PRECISION: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    """Computes one tile of pairs times one tile of outputs in each program. SHARED: the first
    programs compute as many tiles of a shared expert.

    GATED: x [T, H], weight [E, 2 * num_outputs, H] or without a gate half as many outputs,
    activated. Else x [pairs, I], weight
    [E, num_outputs, I], times the pair's weight. A bias has a number for each row of the weight.
    """
    if SHARED > 0:  # noqa: SIM102
        if tl.program_id(0) < SHARED:
            _shared_tile(
                shared_x, shared_weight, shared_out, num_pairs // TOP_K, shared_outputs,
                shared_inner, shared_inner, limit, alpha,
                ROWS, COLS, DEPTH, GATED, GATE, EVEN, PRECISION, OVERLAP,
            )  # fmt: skip
            return
    num_col_tiles = tl.cdiv(num_outputs, COLS)
    expert, pair, col_tile = rows_of_program(
        experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
        ROWS, GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, OVERLAP, IN_FRONT=SHARED,
    )  # fmt: skip
    if tl.min(pair, axis=0) >= num_pairs:
        return
    real = pair < num_pairs
    row = pair
    if GATED:
        row = pair // TOP_K
    col = col_tile * COLS + tl.arange(0, COLS)
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    HAS_UP: tl.constexpr = GATED and GATE != 4
    width = 2 * num_outputs if HAS_UP else num_outputs
    places = weight + (expert.to(tl.int64) * width + col)[None, :] * inner
    acc, second = _products(
        inputs, real, places, num_outputs.to(tl.int64) * inner, col < num_outputs, inner,
        ROWS, COLS, DEPTH, HAS_UP, EVEN, PRECISION,
    )  # fmt: skip
    write_pairs(
        acc, second, pair, col, out, bias, expert.to(tl.int64) * width, pair_weights, num_pairs,
        num_outputs, limit, alpha, GATED, HAS_BIAS, GATE,
    )  # fmt: skip


def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """See `reference.experts.fused_experts`."""
    num_tokens, hidden_size = x.shape
    num_pairs, width = experts.numel(), w2.shape[2]
    if num_tokens == 0:
        return torch.empty_like(x)
    plain = not fixed_order and b13 is None and b2 is None
    if plain and takes_one_row(x, w13, w2):
        parts, _ = one_row_experts(x, w13, w2, weights, experts, gate, ranks=ranks)
        return sum_pairs(parts, experts) if summed else parts
    plan = ExpertPlan.of(
        experts, ExpertShape.of_plain(w13, w2), FIXED if fixed_order else None, ranks
    )
    hidden = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    expert_gemm(x, w13, weights, plan.rows, hidden, plan.gate_up, gated=True, bias=b13, gate=gate)
    expert_gemm(hidden, w2, weights, plan.rows, parts, plan.down, gated=False, bias=b2)
    return sum_pairs(parts, experts) if summed else parts


def experts_beside(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    experts: Tensor,
    shared_w13: Tensor,
    shared_w2: Tensor,
    gate: GateForm | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.experts.experts_beside`."""
    num_tokens, hidden_size = x.shape
    num_pairs, width = experts.numel(), w2.shape[2]
    own = SharedWeights(shared_w13, shared_w2)
    if takes_one_row(x, w13, w2, own):
        return one_row_experts(x, w13, w2, weights, experts, gate, own)
    parts, hidden, beside, shared = (
        torch.empty(size, dtype=x.dtype, device=x.device)
        for size in (
            (num_pairs, hidden_size), (num_pairs, width),
            (num_tokens, hidden_size), (num_tokens, shared_w2.shape[1]),
        )
    )  # fmt: skip
    if num_tokens > 0:
        plan = ExpertPlan.of(experts, ExpertShape.of_plain(w13, w2))
        given = plan.rows, hidden, plan.gate_up
        first = SharedPart(x, shared_w13, shared)
        expert_gemm(x, w13, weights, *given, gated=True, gate=gate, shared=first)
        second = SharedPart(shared, shared_w2, beside)
        expert_gemm(hidden, w2, weights, plan.rows, parts, plan.down, gated=False, shared=second)
    return parts, beside


@dataclass(frozen=True, slots=True)
class SharedPart:
    """Says what a GEMM computes of a shared expert: `x` [T, K] times `weight`, to `out` [T, N]."""

    x: Tensor
    weight: Tensor
    out: Tensor


def expert_gemm(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    rows: ExpertRows,
    out: Tensor,
    tuning: ExpertTuning,
    *,
    gated: bool,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
    shared: SharedPart | None = None,
) -> None:
    """Computes one of the two GEMMs.

    Args:
        x: [T, H] when `gated`, else [T * k, I].
        weight: [E, 2 I, H], without a gate [E, I, H], or [E, H, I].
        pair_weights: [T, k].
        out: [T * k, I], or [T * k, H].
        bias: [E, 2 I], or [E, H]; None: none.
        gate: None: SiLU.
        shared: Of no more tokens than a tile has rows; None: there is no shared expert.
    """
    num_pairs, num_outputs = out.shape
    num_experts, units, inner = weight.shape
    tuning = tuning.within(shared_bytes(x.device), units // num_outputs, x.element_size())
    row_tiles, constants = rows.tiles(tuning.rows)
    sizes, tiles = [(num_outputs, inner)], 0
    if shared is not None:
        sizes.append((shared.out.shape[1], shared.x.shape[1]))
        tiles = triton.cdiv(shared.out.shape[1], tuning.cols)
    grid = (tiles + row_tiles * triton.cdiv(num_outputs, tuning.cols),)
    expert_gemm_kernel[grid](
        x,
        weight,
        bias,
        pair_weights,
        rows.experts,
        rows.order,
        rows.counts,
        out,
        *((None,) * 3 if shared is None else (shared.x, shared.weight, shared.out)),
        num_pairs,
        num_experts,
        num_outputs,
        inner,
        x.stride(0),
        row_tiles,
        *gate_arguments(gate),
        *sizes[-1],
        TOP_K=rows.experts.shape[1],
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        GROUP=tuning.group,
        GATED=gated,
        HAS_BIAS=bias is not None,
        GATE=gate_code(gate),
        EVEN=all(n % tuning.cols == k % tuning.depth == 0 for n, k in sizes),
        PRECISION=precision_of(x),
        SHARED=tiles,
        **constants,
        **tuning.options,
        **rows.launch,
    )
