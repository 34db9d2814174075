"""Experts whose weights are float8 e4m3, as are the numbers that they are multiplied by.

    1. rows in e4m3, each 128 numbers with a scale                    [T, H]
    2. gate·up of each (token, expert) pair, with the activation      [pairs, I]
    3. its rows in e4m3: by step 2 where a tile has 128 outputs
    4. down, times the pair's weight                                  [pairs, H]
    5. the sum over a token's pairs                                   [T, H]

Weights have a scale for each block of 128 x 128, or for each output. Every 128 numbers of the inner
dimension are multiplied by themselves, and their sum by its scales: tensor cores keep few bits of
sums of e4m3 (DeepSeek-V3, 2024). Few rows lie on the side of the operands that may be narrow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import shared_bytes
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.expert_gate import activated
from tandem_kernels.experts.expert_plan import ExpertPlan
from tandem_kernels.experts.expert_rows import ExpertRows, rows_of_program
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning
from tandem_kernels.experts.fp8.ahead_shapes import multiplies_ahead
from tandem_kernels.experts.fp8.experts_ahead import fp8_experts_ahead
from tandem_kernels.experts.fp8.pairs import fp8_pair_gemm
from tandem_kernels.experts.fp8.sorted_rows import SortedTiles, quantise_to_places
from tandem_kernels.gemm.fp8_activations import quantise_fp8
from tandem_kernels.gemm.fp8_rows import fp8_scale, to_fp8
from tandem_kernels.reference.fp8 import GROUP

FORMAT = "fp8"
FIXED = ExpertTuning(rows=64, cols=64, depth=GROUP, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""
_MIN_WIDE_ROWS = 64
"""Tiles of fewer rows are the second operand."""


@triton.jit
def _scaled_gemm(
    given: tl.tensor,
    weight: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    acc: tl.tensor,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Adds the product of rows [ROWS, 128] and a weight [COLS, 128] at an address, scaled."""
    by = tl.load(weight, mask=inside, other=0.0) if MASKED else tl.load(weight)
    if WIDE:
        acc += tl.dot(given, by.T) * scale[:, None]
    else:
        acc += tl.dot(by, given.T) * scale[None, :]
    return acc


@triton.jit
def _block_scales(
    of_block: tl.tensor, of_second: tl.tensor, TWICE: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Loads the scales of a block of the weight, and of a second one; without BLOCKS they are 1."""
    scale = 1.0
    second_scale = 1.0
    if BLOCKS:
        scale = tl.load(of_block)
        if TWICE:
            second_scale = tl.load(of_second)
    return scale, second_scale


@triton.jit
def _of_columns(places: tl.tensor, real_col: tl.tensor) -> tl.tensor:
    """Loads a number for each column: [1, COLS] float32."""
    return tl.load(places, mask=real_col, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _finished(
    acc: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    outputs: tl.tensor,
    real: tl.tensor,
    WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Returns sums as [ROWS, COLS], with what their outputs have scales and biases of."""
    if not WIDE:
        acc = acc.T
    if not BLOCKS:
        acc *= _of_columns(weight_scales + outputs, real)
    if HAS_BIAS:
        acc += _of_columns(bias + outputs, real)
    return acc


@triton.jit(
    do_not_specialize=["num_pairs", "num_row_tiles", "x_scales_stride", "out_scales_stride"]
)
def fp8_expert_gemm_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_scales_stride: tl.tensor,
    out_scales_stride: tl.tensor,
    num_row_tiles: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
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
    BLOCKS: tl.constexpr,
    QUANTISES: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    STRIPS: tl.constexpr,
) -> None:
    """Computes one tile of pairs times one tile of outputs in each program.

    GATED: x [T, H], weight [E, 2, num_outputs, H], activated. Else x [pairs, I], weight
    [E, 1, num_outputs, I], times the pair's weight, and with 2 STRIPS a tile has twice COLS
    outputs: the same rows are multiplied twice, as they are with a gate. BLOCKS: weight_scales [E,
    1 or 2, num_outputs / 128, inner / 128], else [E, 1 or 2, num_outputs]. QUANTISES: COLS is 128,
    and out is e4m3 with a scale for each tile. WIDE: rows are the first operand.
    """
    TWICE: tl.constexpr = GATED or STRIPS == 2
    num_col_tiles = tl.cdiv(num_outputs, COLS * STRIPS)
    expert, pair, col_tile = rows_of_program(
        experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
        ROWS, GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, OVERLAP,
    )  # fmt: skip
    if tl.min(pair, axis=0) >= num_pairs:
        return
    real = pair < num_pairs
    row = tl.where(real, pair // TOP_K if GATED else pair, 0).to(tl.int64)
    first_col = col_tile * (COLS * STRIPS)
    col = first_col + tl.arange(0, COLS)
    real_col = col < num_outputs
    apart = num_outputs if GATED else COLS
    real_second = real_col if GATED else col + COLS < num_outputs
    lane = tl.arange(0, 128)
    num_blocks = tl.cdiv(inner, 128)
    inputs = x + row[:, None] * inner + lane[None, :]
    shares = x_scales + row
    part = expert.to(tl.int64) * 2 if GATED else expert.to(tl.int64)
    first = part * num_outputs + col
    places = weight + first[:, None] * inner + lane[None, :]
    second_places = places + tl.cast(apart, tl.int64) * inner
    num_col_blocks = tl.cdiv(num_outputs, 128)
    of_part = weight_scales + part * num_col_blocks * num_blocks
    of_block = of_part + first_col // 128 * num_blocks
    if GATED:
        of_second = of_block + num_col_blocks * num_blocks
    else:
        # Nothing is written of a second strip behind the last output, but its scale is read.
        of_second = of_part + tl.minimum((first_col + COLS) // 128, num_col_blocks - 1) * num_blocks
    acc = tl.zeros([ROWS, COLS] if WIDE else [COLS, ROWS], tl.float32)
    second = tl.zeros_like(acc)
    # Scales are loaded a step ahead: the compiler does that for operands alone.
    share = tl.load(shares)
    scale, second_scale = _block_scales(of_block, of_second, TWICE, BLOCKS)
    for block in range(num_blocks):
        following = tl.minimum(block + 1, num_blocks - 1)
        next_share = tl.load(shares + following * x_scales_stride)
        next_scales = _block_scales(of_block + following, of_second + following, TWICE, BLOCKS)
        start = block * 128
        given_mask, inside = real[:, None], real_col[:, None]
        inside_second = real_second[:, None]
        if not EVEN:
            real_k = (start + lane < inner)[None, :]
            given_mask, inside = given_mask & real_k, inside & real_k
            inside_second = inside_second & real_k
        given = tl.load(inputs + start, mask=given_mask, other=0.0)
        acc = _scaled_gemm(given, places + start, inside, share * scale, acc, WIDE, not EVEN)
        if TWICE:
            by_up, by_second = second_places + start, share * second_scale
            second = _scaled_gemm(given, by_up, inside_second, by_second, second, WIDE, not EVEN)
        share = next_share
        scale, second_scale = next_scales
    acc = _finished(acc, weight_scales, bias, first, real_col, WIDE, BLOCKS, HAS_BIAS)
    if TWICE:
        at = first + apart
        second = _finished(second, weight_scales, bias, at, real_second, WIDE, BLOCKS, HAS_BIAS)
    to = out + pair.to(tl.int64)[:, None] * num_outputs + col[None, :]
    written = real[:, None] & real_col[None, :]
    if GATED:
        acc = activated(acc, second, limit, alpha, GATE)
    else:
        of_pair = tl.load(pair_weights + pair, mask=real, other=0.0)[:, None]
        acc *= of_pair
        if TWICE:
            also = real[:, None] & real_second[None, :]
            tl.store(to + COLS, (second * of_pair).to(out.dtype.element_ty), mask=also)
    if QUANTISES:
        acc = tl.where(written, acc, 0.0)
        scales = fp8_scale(tl.max(tl.abs(acc), axis=1))
        tl.store(to, to_fp8(acc, scales[:, None]), mask=written)
        tl.store(out_scales + col_tile * out_scales_stride + pair, scales, mask=real)
    else:
        tl.store(to, acc.to(out.dtype.element_ty), mask=written)


def fp8_experts(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """See `reference.quantised_experts.fp8_experts`."""
    num_tokens, hidden_size = x.shape
    num_experts, _, width, _ = w13.shape
    num_pairs = experts.numel()
    if num_tokens == 0:
        return torch.empty_like(x)
    biased = b13 is not None or b2 is not None
    if not fixed_order and multiplies_ahead(x, w13, num_pairs, biased=biased, gate=gate):
        parts = _many_rows(x, (w13, s13), (w2, s2), weights, experts, gate)
        return sum_pairs(parts, experts) if summed else parts
    shape = ExpertShape(num_experts, width, hidden_size, FORMAT)
    plan = ExpertPlan.of(experts, shape, FIXED if fixed_order else None, ranks)
    hidden = _gate_up(x, (w13, s13), weights, plan, num_pairs, b13, gate, ranks)
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    down = w2.unsqueeze(1), s2.unsqueeze(1)
    if isinstance(hidden, Tensor):
        fp8_pair_gemm(hidden, down, weights, experts, parts, plan.down, b2, ranks=ranks)
    else:
        fp8_gemm(hidden, down, weights, plan.rows, (parts, None), plan.down, b2)
    return sum_pairs(parts, experts) if summed else parts


def _many_rows(
    x: Tensor,
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    weights: Tensor,
    experts: Tensor,
    gate: GateForm | None,
) -> Tensor:
    """Computes what each pair gives its token, [pairs, H], of rows that are sorted first."""
    num_pairs, (num_experts, _, width, hidden_size) = experts.numel(), first[0].shape
    rows = SortedTiles.of(experts, num_experts)
    numbers = torch.empty((num_pairs, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((width // GROUP, num_pairs), device=x.device)
    hidden = numbers, scales
    fp8_experts_ahead(quantise_to_places(x, rows), first, weights, rows, hidden, gate)
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    down = second[0].unsqueeze(1), second[1].unsqueeze(1)
    fp8_experts_ahead(hidden, down, weights, rows, (parts, None))
    return parts


def _gate_up(
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    weights: Tensor,
    plan: ExpertPlan,
    num_pairs: int,
    bias: Tensor | None,
    gate: GateForm | None,
    ranks: int,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the first GEMM, whose rows come in e4m3 unless the second quantises them itself."""
    width = weight[0].shape[2]
    size, of_groups = (num_pairs, width), (triton.cdiv(width, GROUP), num_pairs)
    given, itself = quantise_fp8(x, GROUP), plan.down.each_pair
    if not (plan.gate_up.each_pair or itself) and plan.gate_up.cols == GROUP:
        numbers = torch.empty(size, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(of_groups, device=x.device)
        fp8_gemm(given, weight, weights, plan.rows, (numbers, scales), plan.gate_up, bias, gate)
        return numbers, scales
    hidden = torch.empty(size, dtype=x.dtype, device=x.device)
    if plan.gate_up.each_pair:
        of = plan.rows.experts
        fp8_pair_gemm(given, weight, weights, of, hidden, plan.gate_up, bias, gate, ranks)
    else:
        fp8_gemm(given, weight, weights, plan.rows, (hidden, None), plan.gate_up, bias, gate)
    return hidden if itself else quantise_fp8(hidden, GROUP)


def strips_of(num_parts: int, tuning: ExpertTuning) -> int:
    """Returns how many products an output's tile is, of weights of one part, or of gate and up."""
    return 1 if num_parts == 2 else tuning.strips


def fp8_gemm(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    pair_weights: Tensor,
    rows: ExpertRows,
    out: tuple[Tensor, Tensor | None],
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
) -> None:
    """Computes one of the two GEMMs; the first where the weight has two parts.

    Args:
        x: [T, H] or [T * k, I] e4m3, and scales [inner / 128, rows].
        weight: [E, 2, I, H] or [E, 1, H, I] e4m3, and scales as the kernel has them.
        pair_weights: [T, k].
        out: [T * k, I] or [T * k, H]; with scales [I / 128, T * k] it is e4m3.
        bias: [E, 2 I], or [E, H]; None: none.
        gate: None: SiLU.
    """
    given, shares = x
    numbers, scales = weight
    result, result_scales = out
    num_pairs, num_outputs = result.shape
    num_experts, num_parts, _, inner = numbers.shape
    strips = strips_of(num_parts, tuning)
    tuning = tuning.within(shared_bytes(given.device), num_parts * strips, given.element_size())
    row_tiles, constants = rows.tiles(tuning.rows)
    grid = (row_tiles * triton.cdiv(num_outputs, tuning.cols * strips),)
    fp8_expert_gemm_kernel[grid](
        given,
        shares,
        numbers,
        scales,
        bias,
        pair_weights,
        rows.experts,
        rows.order,
        rows.counts,
        result,
        result_scales,
        num_pairs,
        num_experts,
        num_outputs,
        inner,
        shares.stride(0),
        0 if result_scales is None else result_scales.stride(0),
        row_tiles,
        *gate_arguments(gate),
        TOP_K=rows.experts.shape[1],
        COLS=tuning.cols,
        GROUP=tuning.group,
        GATED=num_parts == 2,
        HAS_BIAS=bias is not None,
        GATE=gate_code(gate),
        BLOCKS=scales.dim() == 4,
        QUANTISES=result_scales is not None,
        WIDE=tuning.rows >= _MIN_WIDE_ROWS,
        EVEN=inner % GROUP == 0 and num_outputs % (tuning.cols * strips) == 0,
        STRIPS=strips,
        **constants,
        **tuning.options,
        **rows.launch,
    )
