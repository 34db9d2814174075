"""The experts of a step's only token in MXFP4, from the router's logits to the residual stream.

    1. gate·up of each chosen expert, bias, activation                        [k, I]
    2. down, bias, times the expert's weight, the sum, the residual stream    [1, H]

As in `late`, groups of 32 inputs take turns in the columns of a product, and powers of two multiply
sums. Here a thread knows which column its inputs belong to: it loads them once for all columns, and
those of other columns are zeros by a multiplication. A warp takes 16 outputs, which are words that
lie beside each other, and some turns of the inner dimension (`turns`).

Warps of a program have all turns of its outputs, so nothing sums parts by way of memory. Down's
programs have all experts of the token, whom they choose by themselves: their first weights are on
their way before gate·up has ended (PDL).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.ahead_gate import activated_by_alpha
from tandem_kernels.experts.fp4.one_row.choice import top_expert
from tandem_kernels.experts.fp4.one_row.shapes import one_row_tuning
from tandem_kernels.experts.fp4.one_row.threads import threads_of
from tandem_kernels.experts.fp4.one_row.turns import (
    TURN_TILES,
    asked,
    columns_of,
    in_columns,
    sum_of_warps,
    walked,
)
from tandem_kernels.small_launches import in_turn


@gluon.jit
def _places(
    weight: gl.tensor,
    matrix: gl.tensor,
    unit: gl.tensor,
    thread: gl.tensor,
    num_tile_rows: gl.tensor,
    num_columns: gl.tensor,
) -> gl.tuple:
    """Returns where a thread's words begin of outputs 16 * unit and on of matrix `matrix` [WARPS],
    and their exponents; and how many words a matrix has."""
    size = num_tile_rows * num_columns * 544
    first = weight + (matrix.to(gl.int64) * size + unit // 4 * num_columns * 544)[:, None]
    tiles = first + (unit % 4 * 64 + thread * 2)
    return tiles, first + (512 + unit % 4 * 8 + thread // 4), size


@gluon.jit
def _bias_of_column(
    bias: gl.tensor,
    outputs: gl.tensor,
    unit: gl.tensor,
    own: gl.tensor,
    group: gl.tensor,
    num_outputs: gl.tensor,
    HAS_BIAS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Returns sums to begin with: the bias of both sides' outputs where a thread is their `own`,
    times 2 ** 96 as all sums are. `outputs`: those of the experts before."""
    col = unit * 16 + group
    low = (group * 0).to(gl.float32)
    high = low
    if HAS_BIAS:
        at = bias + outputs + col
        low = gl.load(at, mask=own & (col < num_outputs), other=0.0).to(gl.float32)
        high = gl.load(at + 8, mask=own & (col + 8 < num_outputs), other=0.0).to(gl.float32)
        low, high = low * 2.0**96, high * 2.0**96
    return low, high


@gluon.jit
def _prefetch(at: gl.tensor) -> None:
    """Brings what is at these addresses near: loaded only behind the products, for which there are
    registers then, it would come all the way from memory."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(gl.int64)], gl.int32, False, 1
    )


@gluon.jit
def fp4_one_row_gate_up_kernel(
    x: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    logits: gl.tensor,
    slot_mapping: gl.tensor,
    out: gl.tensor,
    num_outputs: gl.tensor,
    num_tile_rows: gl.tensor,
    num_columns: gl.tensor,
    limit: gl.tensor,
    alpha: gl.tensor,
    TOP_K: gl.constexpr, NUM_EXPERTS: gl.constexpr, LANES: gl.constexpr,
    WARPS: gl.constexpr, TURNS: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATE: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Computes, in program (j, p), outputs 16 * j and on of the expert in place p."""
    warp, thread = threads_of(WARPS)
    group, quad = thread // 4, thread % 4
    unit, pair = gl.program_id(0), gl.program_id(1)
    slot = gl.load(slot_mapping)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    place = gl.arange(0, 1, warp.type.layout) + pair
    found, _ = top_expert(logits, place, 1.0, NUM_EXPERTS, LANES, TOP_K, False, 1, WARPS)
    if slot < 0:
        return
    expert = gl.max(found, axis=0)
    matrix = warp * 0 + expert * 2
    places = _places(weight, matrix, unit, thread, num_tile_rows, num_columns)
    turn = warp[:, None] + thread * 0
    known = asked(places, turn, quad, num_columns, WARPS, AHEAD, True, EVEN)
    col, real = columns_of(unit, num_outputs, WARPS)
    of_col = col
    if HAS_BIAS:
        of_col = bias + expert * (2 * num_outputs) + col
        _prefetch(of_col)
        _prefetch(of_col + num_outputs)
    words = (x + thread * 0).to(gl.pointer_type(gl.int32), bitcast=True)
    zero = (thread * 0).to(gl.float32)
    low, high, low2, high2 = walked(
        known, places, words, turn, (group, quad), num_columns, (zero, zero, zero, zero),
        WARPS, TURNS, AHEAD, True, EVEN,
    )  # fmt: skip
    sums = gl.join(gl.join(low, high), gl.join(low2, high2)).reshape(WARPS, 32, 4)
    gates, ups = gl.split(sum_of_warps(sums, WARPS).reshape(8, 2, 2))
    gates, ups = in_columns(gates, WARPS), in_columns(ups, WARPS)
    if HAS_BIAS:
        gates += gl.load(of_col, mask=real, other=0.0).to(gl.float32)
        ups += gl.load(of_col + num_outputs, mask=real, other=0.0).to(gl.float32)
    total = activated_by_alpha(gates, ups, limit, alpha, GATE).to(out.dtype.element_ty)
    gl.store(out + pair * num_outputs + col, total, mask=real)


@gluon.jit
def fp4_one_row_down_kernel(
    x: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    logits: gl.tensor,
    slot_mapping: gl.tensor,
    pair_weights: gl.tensor,
    experts: gl.tensor,
    out: gl.tensor,
    num_outputs: gl.tensor,
    num_tile_rows: gl.tensor,
    num_columns: gl.tensor,
    inner: gl.tensor,
    scaling: gl.tensor,
    TOP_K: gl.constexpr, NUM_EXPERTS: gl.constexpr, LANES: gl.constexpr,
    RENORMALISE: gl.constexpr, WARPS: gl.constexpr, OF_PAIR: gl.constexpr, TURNS: gl.constexpr,
    AHEAD: gl.constexpr, EVEN: gl.constexpr, HAS_BIAS: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Computes, in program j, outputs 16 * j and on of all experts, each in OF_PAIR warps."""
    warp, thread = threads_of(WARPS)
    group, quad = thread // 4, thread % 4
    unit, pair = gl.program_id(0), warp // OF_PAIR
    if OVERLAP:
        gdc_launch_dependents()
    slot = gl.load(slot_mapping)
    expert, share = top_expert(
        logits, pair, scaling, NUM_EXPERTS, LANES, TOP_K, RENORMALISE, WARPS, WARPS
    )
    expert = gl.convert_layout(expert, warp.type.layout)
    share = gl.convert_layout(share, warp.type.layout)
    places = _places(weight, expert, unit, thread, num_tile_rows, num_columns)
    turn = (warp % OF_PAIR)[:, None] + thread * 0
    known = asked(places, turn, quad, num_columns, OF_PAIR, AHEAD, False, EVEN)
    outputs, first = (expert * num_outputs)[:, None], turn + quad == 0
    low, high = _bias_of_column(bias, outputs, unit, first, group, num_outputs, HAS_BIAS)
    if OVERLAP:
        gdc_wait()
    words = (x + pair[:, None] * inner + thread * 0).to(gl.pointer_type(gl.int32), bitcast=True)
    low, high, _, _ = walked(
        known, places, words, turn, (group, quad), num_columns, (low, high, low, low),
        OF_PAIR, TURNS, AHEAD, False, EVEN,
    )  # fmt: skip
    col, real = columns_of(unit, num_outputs, WARPS)
    real = real & (slot >= 0)
    carried = gl.load(out + col, mask=real, other=0.0).to(gl.float32)
    found = gl.join(low * share[:, None], high * share[:, None])
    total = in_columns(sum_of_warps(found, WARPS), WARPS).to(out.dtype.element_ty)
    total = (total.to(gl.float32) + carried).to(out.dtype.element_ty)
    gl.store(out + col, total, mask=real)
    if unit == 0:
        exists = slot >= 0
        gl.store(experts + pair, gl.where(exists, expert, -1))
        gl.store(pair_weights + pair, gl.where(exists, share, 0.0))


def fp4_one_row_experts(
    x: Tensor,
    logits: Tensor,
    slot_mapping: Tensor,
    residual: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    top_k: int,
    *,
    renormalise: bool = True,
    scaling: float = 1.0,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.quantised_experts.fp4_routed_experts`; only for what `takes_one_row` says."""
    hidden = x.new_empty((top_k, width))
    weights = torch.empty((1, top_k), dtype=torch.float32, device=x.device)
    experts = torch.empty((1, top_k), dtype=torch.int32, device=x.device)
    tuning = one_row_tuning(x.device, width, x.shape[1])
    common = _constants_of_choice(logits, top_k) | in_turn(x.device, 1)
    fp4_one_row_gate_up_kernel[(triton.cdiv(width, 16), top_k)](
        x, w13, b13, logits, slot_mapping, hidden, width, *w13.shape[2:4], *gate_arguments(gate),
        WARPS=tuning.warps,
        HAS_BIAS=b13 is not None,
        GATE=gate_code(gate),
        **_constants_of_turns(w13, tuning.warps, tuning.ahead),
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        **common,
    )  # fmt: skip
    warps = tuning.down_warps * top_k
    fp4_one_row_down_kernel[(triton.cdiv(x.shape[1], 16),)](
        hidden, w2, b2, logits, slot_mapping, weights, experts, residual, x.shape[1],
        *w2.shape[1:3], width, scaling,
        RENORMALISE=renormalise,
        WARPS=warps,
        OF_PAIR=tuning.down_warps,
        HAS_BIAS=b2 is not None,
        **_constants_of_turns(w2, tuning.down_warps, tuning.down_ahead),
        num_warps=warps,
        maxnreg=tuning.down_registers,
        **common,
    )  # fmt: skip
    return weights, experts


def _constants_of_choice(logits: Tensor, top_k: int) -> dict[str, int]:
    lanes = max(32, triton.next_power_of_2(logits.shape[1]))
    return {"TOP_K": top_k, "NUM_EXPERTS": logits.shape[1], "LANES": lanes}


def _constants_of_turns(tiles: Tensor, warps: int, ahead: int) -> dict[str, int | bool]:
    num_columns = tiles.shape[-2]
    turns = triton.cdiv(num_columns, TURN_TILES * warps)
    is_even = num_columns % (TURN_TILES * warps) == 0
    return {"TURNS": turns, "AHEAD": min(ahead, turns), "EVEN": is_even}
