"""Experts in e4m3 of few rows: every (token, expert) pair is computed by itself, in registers.

    1. gate·up of each pair, bias, activation            [pairs, I]
    2. its rows in e4m3; down, bias, times the pair's weight      [pairs, H]

Few rows seldom share an expert, and one row is not worth a matrix unit: a program multiplies a few
outputs' weights where they are loaded, all of the inner dimension. Its sums need no other program,
and however few outputs a rank has, loads of many are in flight at once.

A rank that has some of the experts has few of the pairs, and which ones is known when the step
runs: programs find them, and as many run as the rank has on average. One that finds more computes
one behind the other.

Numbers are those that `fp8_experts` multiplies: products of e4m3 are exact in float32, and 16 of
them are summed before the scale of their block is applied. The second GEMM quantises its row as it
reads it. It begins when experts are known, and so its weights are on their way before the first one
has ended (PDL).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.expert_gate import activated
from tandem_kernels.experts.expert_tuning import ExpertTuning
from tandem_kernels.experts.own_pairs import own_pairs, pair_at
from tandem_kernels.gemm.fp8_rows import fp8_scale, to_fp8

_VECTOR = tl.constexpr(16)
"""Numbers that one instruction loads, of one block."""
_PAIRS = (64, 512)
"""Programs that look for their pair look among as many: few kernels for all steps."""


@triton.jit
def _load_part(
    places: tl.tensor,
    lane: tl.tensor,
    START: tl.constexpr,
    LANES: tl.constexpr,
    END: tl.constexpr,
    APART: tl.constexpr,
) -> tl.tensor:
    """Loads LANES numbers from START on, APART from each other; those from END on are zeros."""
    if START + LANES <= END:
        part = tl.load(places + START * APART)
    else:
        part = tl.load(places + START * APART, mask=(START + lane < END)[None, :], other=0.0)
    return part


@triton.jit
def _numbers_of_row(
    x: tl.tensor,
    shares: tl.tensor,
    lane: tl.tensor,
    block: tl.tensor,
    shares_stride: tl.tensor,
    START: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    QUANTISES: tl.constexpr,
) -> tl.tensor:
    """Returns numbers [1, DEPTH] e4m3 of a row, and the scales [1, DEPTH / 128] of their groups."""
    given = _load_part(x + lane[None, :], lane, START, DEPTH, INNER, 1)
    if QUANTISES:
        groups = given.to(tl.float32).reshape(DEPTH // 128, 128)
        scales = fp8_scale(tl.max(tl.abs(groups), axis=1))
        given = to_fp8(groups, scales[:, None]).reshape(1, DEPTH)
        scales = scales[None, :]
    else:
        first: tl.constexpr = START // 128
        real = (first + block < (INNER + 127) // 128)[None, :]
        places = shares + (first + block).to(tl.int64)[None, :] * shares_stride
        scales = tl.load(places, mask=real, other=0.0)
    return given, scales


@triton.jit
def _products(
    ahead: tl.tensor,
    places: tl.tensor,
    of_blocks: tl.tensor,
    x: tl.tensor,
    shares: tl.tensor,
    lane: tl.tensor,
    block: tl.tensor,
    shares_stride: tl.tensor,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCKS: tl.constexpr,
    QUANTISES: tl.constexpr,
) -> tl.tensor:
    """Returns the sums of a row times weights, [PARTS, COLS].

    Args:
        ahead: The first DEPTH numbers of each weight, [PARTS * COLS, DEPTH] e4m3.
        places: Where weights begin.
        of_blocks: [PARTS, DEPTH / 128], where the scales of the first blocks are.
    """
    GROUPS: tl.constexpr = DEPTH // 128
    VECTORS: tl.constexpr = 128 // _VECTOR
    STEPS: tl.constexpr = (INNER + DEPTH - 1) // DEPTH
    NUM_BLOCKS: tl.constexpr = (INNER + 127) // 128
    sums = tl.zeros([PARTS, COLS, GROUPS, VECTORS], tl.float32)
    for step in tl.static_range(STEPS):
        by = ahead
        if step + 1 < STEPS:
            ahead = _load_part(places, lane, (step + 1) * DEPTH, DEPTH, INNER, 1)
        given, scales = _numbers_of_row(
            x, shares, lane, block, shares_stride, step * DEPTH, DEPTH, INNER, QUANTISES
        )
        if BLOCKS:
            scales *= _load_part(of_blocks, block, step * GROUPS, GROUPS, NUM_BLOCKS, 1)
        wide = by.reshape(PARTS, COLS, GROUPS, VECTORS, _VECTOR).to(tl.float32)
        row = given.reshape(1, 1, GROUPS, VECTORS, _VECTOR).to(tl.float32)
        sums += tl.sum(wide * row, axis=4) * scales[:, None, :, None]
    return tl.sum(sums.reshape(PARTS, COLS, GROUPS * VECTORS), axis=2)


@triton.jit
def _pair_outputs(
    x: tl.tensor,
    shares: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    out: tl.tensor,
    pair: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    num_outputs: tl.tensor,
    shares_stride: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    TOP_K: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCKS: tl.constexpr,
    QUANTISES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes outputs `first` and on, COLS of them, of a pair and of its expert. Other arguments
    are those of the kernel."""
    PARTS: tl.constexpr = 2 if GATED else 1
    lane = tl.arange(0, DEPTH)
    block = tl.arange(0, DEPTH // 128)
    side = tl.arange(0, PARTS * COLS)
    part = expert.to(tl.int64) * PARTS
    # Outputs behind the last are computed like the last, and not written.
    of_part = part + side // COLS
    row = of_part * num_outputs + tl.minimum(first + side % COLS, num_outputs - 1)
    places = weight + row[:, None] * INNER + lane[None, :]
    ahead = _load_part(places, lane, 0, DEPTH, INNER, 1)
    if OVERLAP and not GATED:
        gdc_wait()
    num_blocks: tl.constexpr = (INNER + 127) // 128
    num_col_blocks = tl.cdiv(num_outputs, 128)
    of_blocks = weight_scales + block[None, :]
    if BLOCKS:
        of_first = (part + tl.arange(0, PARTS)) * num_col_blocks + first // 128
        of_blocks += of_first[:, None] * num_blocks
    row_of_x = pair // TOP_K if GATED else pair
    sums = _products(
        ahead, places, of_blocks, x + row_of_x.to(tl.int64) * INNER, shares + row_of_x, lane,
        block, shares_stride, COLS, PARTS, DEPTH, INNER, BLOCKS, QUANTISES,
    )  # fmt: skip
    col = first + tl.arange(0, COLS)
    real = col < num_outputs
    at = (part + tl.arange(0, PARTS))[:, None] * num_outputs + col[None, :]
    if not BLOCKS:
        sums *= tl.load(weight_scales + at, mask=real[None, :], other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + at, mask=real[None, :], other=0.0).to(tl.float32)
    if GATED:
        gates, ups = tl.split(sums.permute(1, 0))
        total = activated(gates, ups, limit, alpha, GATE)
    else:
        total = tl.sum(sums, axis=0) * tl.load(pair_weights + pair)
    to = out + pair.to(tl.int64) * num_outputs + col
    tl.store(to, total.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_pairs", "shares_stride"])
def fp8_pair_gemm_kernel(
    x: tl.tensor,
    shares: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    num_outputs: tl.tensor,
    shares_stride: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    PAIRS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCKS: tl.constexpr,
    QUANTISES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes COLS outputs of one pair in each program. PAIRS: no fewer than there are, of which
    programs find those that have an expert here; 0: each pair has programs of its own.

    GATED: x [T, H], weight [E, 2, num_outputs, H], activated. Else x [pairs, I], weight
    [E, 1, num_outputs, I], times the pair's weight. BLOCKS: weight_scales [E, 1 or 2,
    num_outputs / 128, INNER / 128], else [E, 1 or 2, num_outputs].
    """
    if OVERLAP:
        if GATED:
            gdc_wait()
        gdc_launch_dependents()
    programs_of_pair = tl.cdiv(num_outputs, COLS)
    slot = tl.program_id(0) // programs_of_pair
    first = tl.program_id(0) % programs_of_pair * COLS
    # Experts are not loaded by way of the SM's own cache, which may hold what was there before: the
    # second GEMM has waited for nothing yet.
    if PAIRS == 0:
        expert = tl.load(experts + slot, cache_modifier=".cg")
        if expert >= 0:
            _pair_outputs(
                x, shares, weight, weight_scales, bias, pair_weights, out, slot, expert, first,
                num_outputs, shares_stride, limit, alpha, TOP_K, COLS, DEPTH, INNER, GATED,
                HAS_BIAS, GATE, BLOCKS, QUANTISES, OVERLAP,
            )  # fmt: skip
    else:
        chosen, place, count = own_pairs(experts, num_pairs, PAIRS)
        slots = tl.num_programs(0) // programs_of_pair
        for own in tl.range(slot, count, slots, disable_licm=True):
            pair, expert = pair_at(chosen, place, own, PAIRS)
            _pair_outputs(
                x, shares, weight, weight_scales, bias, pair_weights, out, pair, expert, first,
                num_outputs, shares_stride, limit, alpha, TOP_K, COLS, DEPTH, INNER, GATED,
                HAS_BIAS, GATE, BLOCKS, QUANTISES, OVERLAP,
            )  # fmt: skip
    if OVERLAP and not GATED:
        # Where there was no pair, either: what comes next may write what the first GEMM reads.
        gdc_wait()


def fp8_pair_gemm(
    x: Tensor | tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    pair_weights: Tensor,
    experts: Tensor,
    out: Tensor,
    tuning: ExpertTuning,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
    ranks: int = 1,
) -> None:
    """Computes one of the two GEMMs; the first where the weight has two parts.

    Args:
        x: [T, H] or [T * k, I], quantised here, or as `quantise_fp8` returns them.
        weight: [E, 2, I, H] or [E, 1, H, I] e4m3, and scales as the kernel has them.
        pair_weights, experts: [T, k]; an expert of -1 is none, and writes nothing.
        out: [T * k, I] or [T * k, H].
        bias: [E, 2 I], or [E, H]; None: none.
        gate: None: SiLU.
        ranks: As many have experts of the layer, as a whole.
    """
    given, shares = x if isinstance(x, tuple) else (x, None)
    numbers, scales = weight
    num_parts, inner = numbers.shape[1], numbers.shape[3]
    num_pairs, num_outputs = out.shape
    # A table of another shape may name more of the inner dimension than there is.
    depth = min(tuning.depth, max(128, triton.next_power_of_2(inner)))
    overlap = uses_pdl(given.device)
    slots = triton.cdiv(num_pairs, ranks)
    fp8_pair_gemm_kernel[(slots * triton.cdiv(num_outputs, tuning.cols),)](
        given,
        given if shares is None else shares,
        numbers,
        scales,
        bias,
        pair_weights,
        experts,
        out,
        num_pairs,
        num_outputs,
        0 if shares is None else shares.stride(0),
        *gate_arguments(gate),
        PAIRS=0 if ranks == 1 else _room_for(num_pairs),
        TOP_K=experts.shape[1],
        COLS=tuning.cols,
        DEPTH=depth,
        INNER=inner,
        GATED=num_parts == 2,
        HAS_BIAS=bias is not None,
        GATE=gate_code(gate),
        BLOCKS=scales.dim() == 4,
        QUANTISES=shares is None,
        OVERLAP=overlap,
        **tuning.options,
        **({"launch_pdl": True} if overlap else {}),
    )


def _room_for(num_pairs: int) -> int:
    """Returns among how many pairs programs look."""
    return next((size for size in _PAIRS if num_pairs <= size), triton.next_power_of_2(num_pairs))
