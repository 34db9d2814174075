"""Experts whose weights are int8, with a scale for each output.

    1. rows in int8, each with a scale, if inputs are quantised      [T, H]
    2. gate·up of each (token, expert) pair, with the activation     [pairs, I]
    3. its rows in int8, if inputs are quantised
    4. down, times the pair's weight                                 [pairs, H]
    5. the sum over a token's pairs                                  [T, H]

Sums of integers are int32 and exact. Else weights become the type of the rows as they are
multiplied, which is exact, too. Scales multiply whole sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.experts.expert_outputs import write_pairs
from tandem_kernels.experts.expert_plan import ExpertPlan
from tandem_kernels.experts.expert_rows import ExpertRows, rows_of_program
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import FIXED, ExpertShape, ExpertTuning
from tandem_kernels.gemm.fp8_activations import quantise_int8
from tandem_kernels.gemm.integer_sums import no_sums

FORMAT = "bf16"
"""Nothing has measured tables of int8: it takes those of plain weights."""


@triton.jit(do_not_specialize=["num_pairs", "num_row_tiles"])
def int8_expert_gemm_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    num_row_tiles: tl.tensor,
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
    EVEN: tl.constexpr,
) -> None:
    """Computes one tile of pairs times one tile of outputs in each program.

    GATED: x [T, H], weight [E, 2 * num_outputs, H], activated. Else x [pairs, I], weight
    [E, num_outputs, I], times the pair's weight. Scales of weights are one for each of their rows.
    """
    num_col_tiles = tl.cdiv(num_outputs, COLS)
    expert, pair, col_tile = rows_of_program(
        experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
        ROWS, GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, OVERLAP,
    )  # fmt: skip
    if tl.min(pair, axis=0) >= num_pairs:
        return
    real = pair < num_pairs
    row = pair
    if GATED:
        row = pair // TOP_K
    row = tl.where(real, row, 0).to(tl.int64)
    col = col_tile * COLS + tl.arange(0, COLS)
    real_col = col < num_outputs
    lane = tl.arange(0, DEPTH)
    inputs = x + row[:, None] * x_stride
    width = 2 * num_outputs if GATED else num_outputs
    first = expert.to(tl.int64) * width + col
    places = weight + first[:, None] * inner
    up = num_outputs.to(tl.int64) * inner
    acc = no_sums(x, ROWS, COLS)
    second = no_sums(x, ROWS, COLS)
    for start in range(0, inner, DEPTH):
        k = start + lane
        if EVEN:
            given = tl.load(inputs + k[None, :], mask=real[:, None], other=0)
            by = tl.load(places + k[None, :])
        else:
            real_k = (k < inner)[None, :]
            inside = real_col[:, None] & real_k
            given = tl.load(inputs + k[None, :], mask=real[:, None] & real_k, other=0)
            by = tl.load(places + k[None, :], mask=inside, other=0)
        acc = tl.dot(given, tl.trans(by.to(given.dtype)), acc, out_dtype=acc.dtype)
        if GATED:
            if EVEN:
                by = tl.load(places + up + k[None, :])
            else:
                by = tl.load(places + up + k[None, :], mask=inside, other=0)
            second = tl.dot(given, tl.trans(by.to(given.dtype)), second, out_dtype=acc.dtype)
    scale = tl.load(weight_scales + first, mask=real_col, other=0.0)[None, :]
    sums = acc.to(tl.float32) * scale
    ups = second.to(tl.float32)
    if GATED:
        ups *= tl.load(weight_scales + first + num_outputs, mask=real_col, other=0.0)[None, :]
    if x_scales is not None:
        share = tl.load(x_scales + row, mask=real, other=0.0)[:, None]
        sums *= share
        ups *= share
    write_pairs(
        sums, ups, pair, col, out, None, 0, pair_weights, num_pairs, num_outputs, 0.0, 0.0,
        GATED, False, False,
    )  # fmt: skip


def int8_experts(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    weights: Tensor,
    experts: Tensor,
    quantises: bool,
    fixed_order: bool = False,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """See `reference.int8.int8_experts`."""
    num_tokens, hidden_size = x.shape
    num_experts, doubled, _ = w13.shape
    num_pairs = experts.numel()
    if num_tokens == 0:
        return torch.empty_like(x)
    shape = ExpertShape(num_experts, doubled // 2, hidden_size, FORMAT)
    plan = ExpertPlan.of(experts, shape, FIXED if fixed_order else None, ranks)
    hidden = torch.empty((num_pairs, doubled // 2), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    given = quantise_int8(x) if quantises else (x, None)
    int8_expert_gemm(given, (w13, s13), weights, plan.rows, hidden, plan.gate_up, gated=True)
    given = quantise_int8(hidden) if quantises else (hidden, None)
    int8_expert_gemm(given, (w2, s2), weights, plan.rows, parts, plan.down, gated=False)
    return sum_pairs(parts, experts) if summed else parts


def int8_expert_gemm(
    x: tuple[Tensor, Tensor | None],
    weight: tuple[Tensor, Tensor],
    pair_weights: Tensor,
    rows: ExpertRows,
    out: Tensor,
    tuning: ExpertTuning,
    *,
    gated: bool,
) -> None:
    """Computes one of the two GEMMs.

    Args:
        x: [T, H] when `gated`, else [T * k, I]; int8 with scales [1, rows], or in half precision.
        weight: [E, 2 I, H], or [E, H, I], and a scale for each output of each expert.
        pair_weights: [T, k].
        out: [T * k, I], or [T * k, H].
    """
    given, shares = x
    numbers, scales = weight
    num_pairs, num_outputs = out.shape
    num_experts, _, inner = numbers.shape
    row_tiles, constants = rows.tiles(tuning.rows)
    grid = (row_tiles * triton.cdiv(num_outputs, tuning.cols),)
    int8_expert_gemm_kernel[grid](
        given,
        shares,
        numbers,
        scales,
        pair_weights,
        rows.experts,
        rows.order,
        rows.counts,
        out,
        num_pairs,
        num_experts,
        num_outputs,
        inner,
        given.stride(0),
        row_tiles,
        TOP_K=rows.experts.shape[1],
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        GROUP=tuning.group,
        GATED=gated,
        EVEN=inner % tuning.depth == 0 and num_outputs % tuning.cols == 0,
        **constants,
        **tuning.options,
        **rows.launch,
    )
