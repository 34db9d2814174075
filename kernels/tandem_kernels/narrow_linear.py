"""Products of few rows: what a decode step of a small batch spends most of its time on.

Such a product is a single pass over the weights. What costs beyond their bytes is the time in
which memory stands still: while a kernel starts, while its last programs drain, while a second
kernel adds up what the first has cut. So

- a program asks for the beginning of its weights before it waits for the kernel before it
  (programmatic dependent launch): weights do not depend on anything. They come to the cache while
  the predecessor still runs;
- a product whose outputs are too few for all SMs is cut along its inner dimension, and the norm
  that follows adds up the parts (`partial_linear`);
- the gated activation is part of the product before it (`gate_up_silu`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import overlaps_launches
from tandem_kernels.prefetch import LINE, ask_for

Kind = Literal["plain", "partial", "gated"]


@dataclass(frozen=True, slots=True)
class NarrowTuning:
    """How one shape runs best; found by measurement.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
        parts: Pieces of the inner dimension.
        ahead: Elements of each weight row asked for before the predecessor has ended.
        late: The next kernel may start when the programs of this one have read all weights, not
            when they have begun. It finds free SMs then.
    """

    cols: int
    depth: int
    parts: int
    num_warps: int
    num_stages: int
    ahead: int = 256
    late: bool = False


def narrow_tuning(kind: Kind, num_outputs: int, inner: int) -> NarrowTuning:
    """Of a product with weights [num_outputs, inner]; both halves of a gate count once."""
    if kind == "gated":
        return NarrowTuning(cols=32, depth=256, parts=1, num_warps=4, num_stages=3)
    if kind == "partial":
        return NarrowTuning(cols=64, depth=128, parts=4, num_warps=4, num_stages=5)
    return NarrowTuning(cols=32, depth=256, parts=1, num_warps=4, num_stages=4)


@triton.jit
def _ask_for(rows: tl.tensor, AHEAD: tl.constexpr, LINE: tl.constexpr) -> None:
    """The first AHEAD elements of each of `rows` [COLS] come to the cache."""
    line = tl.arange(0, AHEAD // LINE) * LINE
    ask_for(rows[:, None] + line[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def narrow_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
    LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (j, p): outputs j * COLS and on, of the p-th piece of the inner dimension.

    `out` is [pieces, rows, outputs]. When GATED, outputs are those of the gate, and the weights of
    an output's other half lie `num_outputs` rows behind.
    """
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    steps = tl.cdiv(inner // DEPTH, tl.num_programs(1))
    begin = tl.program_id(1) * steps * DEPTH
    end = tl.minimum(begin + steps * DEPTH, inner)
    rows_of_weight = weight + col.to(tl.int64) * inner
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        if (AHEAD > 0) and (begin + AHEAD <= inner):
            _ask_for(rows_of_weight + begin, AHEAD, LINE)
            if GATED:
                _ask_for(rows_of_weight + num_outputs.to(tl.int64) * inner + begin, AHEAD, LINE)
        gdc_wait()
    row = tl.arange(0, ROWS)
    real = (row < num_rows)[:, None]
    lane = tl.arange(0, DEPTH)
    inputs = x + row[:, None] * x_stride
    acc = tl.zeros([ROWS, COLS], tl.float32)
    second = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(begin, end, DEPTH):
        k = start + lane
        given = tl.load(inputs + k[None, :], mask=real, other=0.0)
        places = rows_of_weight[:, None] + k[None, :]
        acc = tl.dot(given, tl.trans(tl.load(places)), acc)
        if GATED:
            others = tl.load(places + num_outputs.to(tl.int64) * inner)
            second = tl.dot(given, tl.trans(others), second)
    if OVERLAP and LATE:
        gdc_launch_dependents()
    kind = out.dtype.element_ty
    if GATED:
        gate = acc.to(kind).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * second.to(kind).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + col).to(tl.float32)[None, :]
    to = out + (tl.program_id(1) * num_rows + row[:, None]) * num_outputs + col[None, :]
    tl.store(to, acc.to(kind), mask=real)


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear.narrow_linear`; only for what `narrow_shapes.takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out[None], narrow_tuning("plain", *weight.shape), gated=False)
    return out


def partial_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.linear.partial_linear`; only for what `narrow_shapes.takes` says."""
    tuning = narrow_tuning("partial", *weight.shape)
    shape = (tuning.parts, x.shape[0], weight.shape[0])
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, tuning, gated=False)
    return out


def gate_up_silu(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.linear.gate_up_silu`; only for what `narrow_shapes.takes` says."""
    num_outputs, inner = weight.shape[0] // 2, weight.shape[1]
    out = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=x.device)
    _launch(x, weight, None, out[None], narrow_tuning("gated", num_outputs, inner), gated=True)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tuning: NarrowTuning, gated: bool
) -> None:
    num_parts, num_rows, num_outputs = out.shape
    overlap = overlaps_launches(x.device)
    narrow_linear_kernel[(num_outputs // tuning.cols, num_parts)](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_outputs,
        weight.shape[1],
        x.stride(0),
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        GATED=gated,
        HAS_BIAS=bias is not None,
        AHEAD=tuning.ahead,
        LINE=LINE,
        LATE=tuning.late,
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )
