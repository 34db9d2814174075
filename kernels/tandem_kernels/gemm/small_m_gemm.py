"""Small-M GEMMs, of few rows: what a decode step of a small batch spends most of its time on.

Such a GEMM is a single pass over the weights. What costs beyond their bytes is the time in
which memory stands still, while a kernel starts and while its last programs drain. So these
kernels and the small ones around them overlap (PDL, programmatic dependent launch): the next is in
place before this one has ended. And the gated activation is part of the GEMM before it.

A program has COLS outputs, and where these are too few for all SMs, one of SPLITS parts of the
inner dimension: an SM has few loads in flight, so that fewer SMs read more slowly. The last program
of an output to end adds the parts up, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import supports_pdl
from tandem_kernels.gemm.small_m_shapes import tile_rows
from tandem_kernels.part_sums import sum_of_parts
from tandem_kernels.stream_lanes import lane_counters
from tandem_kernels.tunings.table import TuningTable

_LEAST_PART = 1024
"""Shorter parts of the inner dimension end before all their loads are in flight."""
MOST_TILES = 1024
"""A GEMM in parts has fewer, else there would be no need of parts."""


@dataclass(frozen=True, slots=True)
class SmallMTuning:
    """Says how one kind runs best; found by measurement inside whole decode steps.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
        splits: Parts of the inner dimension; of gated ones there is one.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1


@dataclass(frozen=True, slots=True)
class _Row:
    """Holds what a row of the table takes. `programs`: the inner dimension is cut into as many
    parts as make no more than these; 0: into one."""

    tuning: SmallMTuning
    programs: int = 0


def _fit(taken: _Row, gated: bool, num_rows: int, num_outputs: int, inner: int) -> SmallMTuning:
    tuning = taken.tuning
    splits = min(taken.programs * tuning.cols // num_outputs, inner // _LEAST_PART)
    return replace(tuning, splits=max(1, splits))


_TABLE = TuningTable("small_m", _Row, ("gated", "num_rows", "num_outputs", "inner"), _fit)


def small_m_tuning(
    device: torch.device, gated: bool, num_rows: int, num_outputs: int, inner: int
) -> SmallMTuning:
    """Chooses for [num_rows, inner] -> [num_rows, num_outputs]; `gated`: two weights for each.
    `bench.engine.gemms --formats small-m --tune` times others."""
    return _TABLE.choose(device, gated, num_rows, num_outputs, inner)


@triton.jit(do_not_specialize=["num_rows"])
def small_m_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    tickets: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (j, p), part p of outputs j * COLS and on. When GATED, they are the
    gate's, and the weights of an output's other half lie `num_outputs` rows behind. `parts`:
    [SPLITS, num_rows, num_outputs] float32; `tickets`: zero for each j, before and behind.
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
    steps = tl.cdiv(inner // DEPTH, SPLITS) * DEPTH
    first = tl.program_id(1) * steps
    for start in range(first, tl.minimum(first + steps, inner), DEPTH):
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
    to = row[:, None] * num_outputs + col[None, :]
    if SPLITS > 1:
        apart = num_rows * num_outputs
        tl.store(parts + tl.program_id(1) * apart + to, acc, mask=real)
        tl.debug_barrier()
        ticket = tickets + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(ticket, 0)
        acc = sum_of_parts(parts + to, apart, real, SPLITS)
    if HAS_BIAS:
        acc += tl.load(bias + col).to(tl.float32)[None, :]
    tl.store(out + to, acc.to(kind), mask=real)


def small_m_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.gemm.small_m_gemm`; only for what `small_m_shapes.takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    tuning = small_m_tuning(x.device, False, len(x), *weight.shape)
    run_small_m(x, weight, bias, out, tuning, gated=False)
    return out


def small_m_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gemm.small_m_gate_up`; only for what `small_m_shapes.takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    tuning = small_m_tuning(x.device, True, len(x), len(weight) // 2, weight.shape[1])
    run_small_m(x, weight, None, out, tuning, gated=True)
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
    parts = tickets = None
    if tuning.splits > 1:
        assert not gated, "what is activated is the whole sum"
        parts = x.new_empty((tuning.splits, num_rows, num_outputs), dtype=torch.float32)
        tickets = lane_counters("small_m_gemm", MOST_TILES, x.device)
    small_m_gemm_kernel[(num_outputs // tuning.cols, tuning.splits)](
        x,
        weight,
        bias,
        out,
        parts,
        tickets,
        num_rows,
        num_outputs,
        weight.shape[1],
        x.stride(0),
        ROWS=tile_rows(num_rows),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        SPLITS=tuning.splits,
        GATED=gated,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )
