"""Small-M GEMMs, of few rows: what a decode step of a small batch spends most of its time on.

Such a GEMM is a single pass over the weights. What costs beyond their bytes is the time in
which memory stands still, while a kernel starts and while its last programs drain. So these
kernels and the small ones around them overlap (PDL, programmatic dependent launch): the next is in
place before this one has ended. And the gated activation is part of the GEMM before it.

GEMMs with fewer outputs (behind attention, behind the activation) stay with the library: cut
along the inner dimension for the SMs' sake, they were not faster inside a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import supports_pdl
from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class SmallMTuning:
    """Says how one kind runs best; found by measurement inside whole decode steps.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int


_TABLE = plain_table("small_m", SmallMTuning, ("gated",))


def small_m_tuning(device: torch.device, gated: bool) -> SmallMTuning:
    """Chooses by whether two outputs are computed for each column."""
    return _TABLE.choose(device, gated)


@triton.jit(do_not_specialize=["num_rows"])
def small_m_gemm_kernel(
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
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program j, outputs j * COLS and on. When GATED, they are the gate's, and the
    weights of an output's other half lie `num_outputs` rows behind.
    """
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows_of_weight = weight + col.to(tl.int64) * inner
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    real = (row < num_rows)[:, None]
    lane = tl.arange(0, DEPTH)
    inputs = x + row[:, None] * x_stride
    acc = tl.zeros([ROWS, COLS], tl.float32)
    second = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, inner, DEPTH):
        k = start + lane
        given = tl.load(inputs + k[None, :], mask=real, other=0.0)
        places = rows_of_weight[:, None] + k[None, :]
        acc = tl.dot(given, tl.trans(tl.load(places)), acc)
        if GATED:
            others = tl.load(places + num_outputs.to(tl.int64) * inner)
            second = tl.dot(given, tl.trans(others), second)
    kind = out.dtype.element_ty
    if GATED:
        gate = acc.to(kind).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * second.to(kind).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + col).to(tl.float32)[None, :]
    to = out + row[:, None] * num_outputs + col[None, :]
    tl.store(to, acc.to(kind), mask=real)


def small_m_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.gemm.small_m_gemm`; only for what `small_m_shapes.takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    run_small_m(x, weight, bias, out, small_m_tuning(x.device, False), gated=False)
    return out


def small_m_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gemm.small_m_gate_up`; only for what `small_m_shapes.takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    run_small_m(x, weight, None, out, small_m_tuning(x.device, True), gated=True)
    return out


def run_small_m(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: SmallMTuning,
    *,
    gated: bool,
) -> None:
    """Computes one GEMM into `out` [T, N]."""
    num_rows, num_outputs = out.shape
    overlap = supports_pdl(x.device)
    small_m_gemm_kernel[(num_outputs // tuning.cols,)](
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
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )
