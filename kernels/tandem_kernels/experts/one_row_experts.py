"""The experts of a step's only token, and a shared one beside them, in half precision.

    1. gate·up of each chosen expert and of the shared one, activation      [k, I], [1, S]
    2. down; those of chosen experts times their weight                     [k, H], [1, H]

One row is not worth a matrix unit: a program multiplies a few outputs' weights where they are
loaded, as in `few_row_gemm`. The second GEMM begins when experts are known, and so its weights are
on their way before the first one has ended (PDL).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.expert_gate import activated
from tandem_kernels.experts.own_pairs import own_pairs, pair_at
from tandem_kernels.gemm.few_row_gemm import (
    FewRowTuning,
    load_words,
    products_in_registers,
    word_places,
)
from tandem_kernels.gemm.few_row_shapes import takes


@triton.jit
def _outputs(
    x: tl.tensor,
    weight: tl.tensor,
    first: tl.tensor,
    program: tl.tensor,
    num_outputs: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tl.tensor:
    """Returns outputs `program` * COLS and on, [COLS] float32, of the row at `x` and of the expert
    whose weight begins with row `first`; activated where GATED."""
    HAS_UP: tl.constexpr = GATED and GATE != 4
    ROWS: tl.constexpr = 2 * COLS if HAS_UP else COLS
    side = tl.arange(0, ROWS)
    lane = tl.arange(0, DEPTH // 2)
    row = tl.minimum(program * COLS + side % COLS, num_outputs - 1)
    row += first + side // COLS * num_outputs
    places = word_places(weight, row, INNER, lane)
    ahead = load_words(places, lane, 0, DEPTH // 2, INNER)
    inputs = word_places(x, tl.arange(0, 1), INNER, lane)
    acc, _ = products_in_registers(
        ahead, places, inputs, None, lane, ROWS, 1, DEPTH // 2, INNER,
        weight.dtype.element_ty, False, OVERLAP and not GATED,
    )  # fmt: skip
    if HAS_UP:
        gates, ups = tl.split(acc.reshape(2, COLS).permute(1, 0))
        total = activated(gates, ups, limit, alpha, GATE)
    else:
        total = tl.sum(acc, axis=1)
        if GATED:
            total = activated(total, total, limit, alpha, GATE)
    return total


@triton.jit
def _of_pair(
    x: tl.tensor,
    weight: tl.tensor,
    pair_weights: tl.tensor,
    out: tl.tensor,
    pair: tl.tensor,
    expert: tl.tensor,
    program: tl.tensor,
    num_outputs: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes outputs `program` * COLS and on of a pair and of its expert; of -1 none is written.
    Other arguments are those of the kernel."""
    HAS_UP: tl.constexpr = GATED and GATE != 4
    first = tl.maximum(expert, 0) * (2 * num_outputs if HAS_UP else num_outputs)
    row = x
    if not GATED:
        row += pair * INNER
    total = _outputs(
        row, weight, first, program, num_outputs, limit, alpha,
        COLS, DEPTH, INNER, GATED, GATE, OVERLAP,
    )  # fmt: skip
    if not GATED:
        total *= tl.load(pair_weights + pair)
    col = program * COLS + tl.arange(0, COLS)
    real = (col < num_outputs) & (expert >= 0)
    tl.store(out + pair * num_outputs + col, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def one_row_expert_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    shared_x: tl.tensor,
    shared_weight: tl.tensor,
    shared_out: tl.tensor,
    num_pairs: tl.tensor,
    num_outputs: tl.tensor,
    shared_outputs: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    PAIRS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes COLS outputs of one expert in each program. SHARED: the first programs, as many,
    compute those of a shared expert. PAIRS: no fewer than the token has, of which programs find
    those whose experts are here; 0: each pair has programs of its own.

    GATED: x [1, H], weight [E, 2 * num_outputs, H] or without a gate half as many, activated. Else
    x [k, I], weight [E, num_outputs, I], times the pair's weight.
    """
    if OVERLAP:
        if GATED:
            gdc_wait()
        gdc_launch_dependents()
    kind = out.dtype.element_ty
    lane = tl.arange(0, COLS)
    if SHARED > 0:  # noqa: SIM102
        if tl.program_id(0) < SHARED:
            total = _outputs(
                shared_x, shared_weight, 0, tl.program_id(0), shared_outputs, limit, alpha,
                COLS, DEPTH, SHARED_INNER, GATED, GATE, OVERLAP,
            )  # fmt: skip
            col = tl.program_id(0) * COLS + lane
            tl.store(shared_out + col, total.to(kind), mask=col < shared_outputs)
            return
    programs_of_pair = tl.cdiv(num_outputs, COLS)
    slot = (tl.program_id(0) - SHARED) // programs_of_pair
    program = (tl.program_id(0) - SHARED) % programs_of_pair
    # Experts are not loaded by way of the SM's own cache, which may hold what was there before: the
    # second GEMM has waited for nothing yet.
    if PAIRS == 0:
        expert = tl.load(experts + slot, cache_modifier=".cg")
        _of_pair(
            x, weight, pair_weights, out, slot, expert, program, num_outputs, limit, alpha,
            COLS, DEPTH, INNER, GATED, GATE, OVERLAP,
        )  # fmt: skip
    else:
        chosen, place, count = own_pairs(experts, num_pairs, PAIRS)
        slots = (tl.num_programs(0) - SHARED) // programs_of_pair
        for own in tl.range(slot, count, slots, disable_licm=True):
            pair, expert = pair_at(chosen, place, own, PAIRS)
            _of_pair(
                x, weight, pair_weights, out, pair, expert, program, num_outputs, limit, alpha,
                COLS, DEPTH, INNER, GATED, GATE, OVERLAP,
            )  # fmt: skip
        if OVERLAP and not GATED:
            # Where there was no pair, either: what comes next may write what the first GEMM reads.
            gdc_wait()


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Holds a shared expert: `w13` [2 S, H], without a gate [S, H], and `w2` [H, S]."""

    w13: Tensor
    w2: Tensor


def takes_one_row(x: Tensor, w13: Tensor, w2: Tensor, shared: SharedWeights | None = None) -> bool:
    """Returns whether `x` [T, H] is one row, and all rows of weights begin where vectors may."""
    if len(x) != 1:
        return False
    seconds = [w2.flatten(0, 1)] if shared is None else [w2.flatten(0, 1), shared.w2]
    firsts = [w13.flatten(0, 1)] if shared is None else [w13.flatten(0, 1), shared.w13]
    return all(takes(x, weight) for weight in firsts) and all(
        takes(weight[:1], weight) for weight in seconds
    )


def one_row_tuning(num_rows: int, inner: int) -> FewRowTuning:
    """Returns how a GEMM runs of which a program loads `num_rows` rows of weights for each of its
    outputs. A layer of Nemotron 3 Nano takes 75 us in place of 82 by tiles, of Qwen3.5-35B-A3B 50
    in place of 54; router to sum of DeepSeek-V2-Lite 39 in place of 50 (one H200)."""
    depth = min(2048, triton.next_power_of_2(inner))
    return FewRowTuning(cols=4 // num_rows, depth=depth, num_warps=max(1, depth // 512))


def one_row_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate: GateForm | None,
    shared: SharedWeights | None = None,
    ranks: int = 1,
) -> tuple[Tensor, Tensor]:
    """Computes the experts of one token; only for what `takes_one_row` says.

    Args:
        ranks: As many have experts of the layer, as a whole. One has few of the token's pairs, and
            as many programs as for its part of them on average.

    Returns:
        (what `fused_experts` does, not summed, [k, H]; what the shared expert makes of the token,
        [1, H], or nothing, [0, H]).
    """
    num_pairs, hidden_size = experts.numel(), x.shape[1]
    width, num_shared = w2.shape[2], 0 if shared is None else 1
    shared_width = width if shared is None else shared.w2.shape[1]
    sizes = (num_pairs, hidden_size), (num_pairs, width)
    own = (num_shared, hidden_size), (num_shared, shared_width)
    parts, hidden, beside, between = (x.new_empty(size) for size in (*sizes, *own))
    first, second = (None, None) if shared is None else (shared.w13, shared.w2)
    given = weights, experts, gate, ranks
    _run((x, w13, hidden), (x, first, between), *given, gated=True)
    _run((hidden, w2, parts), (between, second, beside), *given, gated=False)
    return parts, beside


def _run(
    of_experts: tuple[Tensor, Tensor, Tensor],
    of_shared: tuple[Tensor, Tensor | None, Tensor],
    weights: Tensor,
    experts: Tensor,
    gate: GateForm | None,
    ranks: int,
    *,
    gated: bool,
) -> None:
    """Computes one of the two GEMMs: rows times weights, to where outputs go, of the chosen experts
    and of the shared one."""
    x, weight, out = of_experts
    shared_x, shared_weight, shared_out = of_shared
    inner = weight.shape[2]
    tuning = one_row_tuning(weight.shape[1] // out.shape[1], inner)
    programs = len(shared_out) * triton.cdiv(shared_out.shape[1], tuning.cols)
    overlap = uses_pdl(x.device, 1)
    slots = triton.cdiv(len(out), ranks)
    one_row_expert_kernel[(programs + slots * triton.cdiv(out.shape[1], tuning.cols),)](
        x,
        weight,
        weights,
        experts,
        out,
        shared_x,
        shared_weight,
        shared_out,
        len(out),
        out.shape[1],
        shared_out.shape[1],
        *gate_arguments(gate),
        PAIRS=0 if ranks == 1 else triton.next_power_of_2(len(out)),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        INNER=inner,
        SHARED=programs,
        SHARED_INNER=inner if shared_weight is None else shared_weight.shape[1],
        GATED=gated,
        GATE=gate_code(gate),
        OVERLAP=overlap,
        **tuning.options,
        **({"launch_pdl": True} if overlap else {}),
    )
