"""Small-M GEMMs on weights of 8 bits: few rows, where reading the weights is all that takes time.

A program has COLS outputs, and where these are too few for all SMs, one of SPLITS parts of the
inner dimension: partial sums then meet in memory, and the last program of an output adds them, in
their order. SWAPped, the weights are the first operand: the matrix units of Hopper take 64 rows of
that at least, and few of the other.

Without scales of x, x is in half precision and weights are converted as they are multiplied. Both
may be int8 as well, which is summed in int32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.cache_lines import prefetch_lines
from tandem_kernels.device import supports_pdl
from tandem_kernels.elementwise.silu_and_mul import silu_and_mul
from tandem_kernels.gemm.fp8_activations import scale_product
from tandem_kernels.gemm.fp8_few_rows import few_fp8_tuning, fp8_few_rows
from tandem_kernels.gemm.fp8_library import fp8_product, one, scaled_mm
from tandem_kernels.gemm.fp8_paths import fp8_path
from tandem_kernels.gemm.fp8_tuning import Fp8Tuning, fp8_tuning
from tandem_kernels.gemm.integer_sums import no_sums
from tandem_kernels.part_sums import sum_of_parts
from tandem_kernels.stream_lanes import lane_counters

_MAX_PROGRAMS = 4096
"""Programs along the outputs, at most: each has a counter."""


@triton.jit
def _multiplied(
    acc: tl.tensor,
    given: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    SWAP: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Adds given [ROWS, DEPTH] x weight [COLS, DEPTH] to `acc`, times the scales of this block."""
    if given.dtype != weight.dtype:
        weight = weight.to(given.dtype)
    if BLOCKS:
        if SWAP:
            acc += tl.dot(weight, tl.trans(given)) * scale[None, :]
        else:
            acc += tl.dot(given, tl.trans(weight)) * scale[:, None]
    elif SWAP:
        acc = tl.dot(weight, tl.trans(given), acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(given, tl.trans(weight), acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def _scaled(
    acc: tl.tensor,
    x_scales: tl.tensor,
    w_scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    num_rows: tl.tensor,
    SWAP: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Multiplies by the scales of rows and outputs; returns [ROWS, COLS]."""
    acc = acc.to(tl.float32)
    if SWAP:
        acc = tl.trans(acc)
    if not BLOCKS:
        acc *= tl.load(w_scales + col)[None, :]
        if x_scales is not None:
            acc *= tl.load(x_scales + row, mask=row < num_rows, other=0.0)[:, None]
    return acc


@triton.jit
def _write(
    acc: tl.tensor,
    second: tl.tensor,
    bias: tl.tensor,
    col: tl.tensor,
    to: tl.tensor,
    real: tl.tensor,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Writes sums [ROWS, COLS], with their bias, or activated with `second`."""
    kind = to.dtype.element_ty
    if GATED:
        gate = acc.to(kind).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * second.to(kind).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + col).to(tl.float32)[None, :]
    tl.store(to, acc.to(kind), mask=real)


@triton.jit
def _scales_of_step(
    x_scales: tl.tensor,
    w_scales: tl.tensor,
    behind: tl.tensor,
    step: tl.tensor,
    real: tl.tensor,
    stride: tl.tensor,
    BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the scales of a step's products with rows `x_scales` [ROWS], and of those with the
    other half of the outputs, whose scales lie `behind`."""
    scale = tl.zeros(real.shape, tl.float32)
    other = scale
    if BLOCKS:
        scale = tl.load(x_scales + step * stride, mask=real, other=0.0)
        if GATED:
            other = scale * tl.load(w_scales + behind + step)
        scale *= tl.load(w_scales + step)
    return scale, other


@triton.jit(do_not_specialize=["num_rows", "x_scales_stride"])
def fp8_small_m_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    tickets: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    group_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    x_scales_stride: tl.tensor,
    w_scales_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """Computes, in program (j, s), part s of outputs j * COLS and on. When GATED, they are the
    gate's, and the weights of an output's other half lie `num_outputs` rows behind. With BLOCKS,
    DEPTH inputs and 128 outputs share a scale, and x_scales is [K / DEPTH, x_scales_stride].
    Of each `group_outputs` outputs, inputs lie behind those of the group before.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    col = tile * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    real = (row < num_rows)[:, None]
    lane = tl.arange(0, DEPTH)
    rows_of_weight = weight + col.to(tl.int64) * inner
    others = num_outputs.to(tl.int64) * inner
    steps = inner // (DEPTH * SPLITS)
    if OVERLAP:
        gdc_launch_dependents()
        if LINES > 0:
            line = tl.minimum(tl.arange(0, LINES), steps * (DEPTH // 128) - 1)
            first = rows_of_weight + part * steps * DEPTH
            prefetch_lines(first[:, None] + line[None, :] * 128)
            if GATED:
                prefetch_lines(first[:, None] + line[None, :] * 128 + others)
        gdc_wait()
    if SWAP:
        acc = no_sums(x, COLS, ROWS)
        second = no_sums(x, COLS, ROWS)
    else:
        acc = no_sums(x, ROWS, COLS)
        second = no_sums(x, ROWS, COLS)
    group = tile * COLS // group_outputs
    x += group * inner
    of_rows = x_scales
    if BLOCKS:
        of_rows += group * (inner // DEPTH) * x_scales_stride + row
    w_block = w_scales + tile * COLS // 128 * w_scales_stride
    behind = num_outputs // 128 * w_scales_stride
    if SWAP:
        # One step ahead of their use: the compiler does so only for what is multiplied.
        ahead, other_ahead = _scales_of_step(
            of_rows, w_block, behind, part * steps, row < num_rows, x_scales_stride, BLOCKS, GATED
        )
    for step in range(part * steps, (part + 1) * steps):
        k = step * DEPTH + lane
        given = tl.load(x + row[:, None] * x_stride + k[None, :], mask=real, other=0.0)
        if SWAP:
            scale, other_scale = ahead, other_ahead
        at = tl.minimum(step + 1, inner // DEPTH - 1) if SWAP else step
        found, other_found = _scales_of_step(
            of_rows, w_block, behind, at, row < num_rows, x_scales_stride, BLOCKS, GATED
        )
        if SWAP:
            ahead, other_ahead = found, other_found
        else:
            scale, other_scale = found, other_found
        places = rows_of_weight[:, None] + k[None, :]
        acc = _multiplied(acc, given, tl.load(places), scale, SWAP, BLOCKS)
        if GATED:
            ups = tl.load(places + others)
            second = _multiplied(second, given, ups, other_scale, SWAP, BLOCKS)
    acc = _scaled(acc, x_scales, w_scales, row, col, num_rows, SWAP, BLOCKS)
    if GATED:
        second = _scaled(second, x_scales, w_scales, row, num_outputs + col, num_rows, SWAP, BLOCKS)
    to = row[:, None] * num_outputs + col[None, :]
    if SPLITS > 1:
        half = num_rows * num_outputs
        stride = half * 2 if GATED else half
        tl.store(partial + part * stride + to, acc, mask=real)
        if GATED:
            tl.store(partial + part * stride + half + to, second, mask=real)
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(tickets + tile, 0)
            acc = sum_of_parts(partial + to, stride, real, SPLITS)
            if GATED:
                second = sum_of_parts(partial + half + to, stride, real, SPLITS)
            _write(acc, second, bias, col, out + to, real, GATED, HAS_BIAS)
    else:
        _write(acc, second, bias, col, out + to, real, GATED, HAS_BIAS)


def prepare(device: torch.device) -> None:
    """Makes what lives as long as the device. Not inside a capture of a graph: it would live with
    the graph."""
    _tickets(device)
    one(device)


def _tickets(device: torch.device) -> Tensor:
    """Returns the counters of programs that have ended, all 0 between kernels of a lane."""
    return lane_counters("fp8_gemm", _MAX_PROGRAMS, device)


def fp8_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `reference.fp8_linear.fp8_gemm`."""
    path = fp8_path(len(x), weight, w_scales)
    if path == "unscaled":
        return scale_product(fp8_product(x, weight), x_scales, w_scales, bias)
    if path == "scaled":
        return scaled_mm(x, x_scales, weight, w_scales, bias, out_dtype)
    if w_scales.dim() == 2:
        return _by_blocks(x, x_scales, weight, w_scales, bias, out_dtype)
    out = torch.empty((len(x), len(weight)), dtype=out_dtype, device=x.device)
    tuning = fp8_tuning(x.device, len(x), *weight.shape, gated=False, blocks=False)
    return fp8_small_m(x, x_scales, weight, w_scales, bias, out, tuning)


def fp8_gate_up(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See `reference.fp8_linear.fp8_gate_up`."""
    if fp8_path(len(x), weight, w_scales) != "small":
        return silu_and_mul(fp8_gemm(x, x_scales, weight, w_scales, None, out_dtype))
    num_outputs, inner = len(weight) // 2, weight.shape[1]
    out = torch.empty((len(x), num_outputs), dtype=out_dtype, device=x.device)
    tuning = fp8_tuning(
        x.device, len(x), num_outputs, inner, gated=True, blocks=w_scales.dim() == 2
    )
    return fp8_small_m(x, x_scales, weight, w_scales, None, out, tuning, gated=True)


def fp8_group_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `reference.fp8_linear.fp8_group_gemm`; of few rows."""
    return _by_blocks(x, x_scales, weight, w_scales, None, out_dtype, groups)


def _by_blocks(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    groups: int = 1,
) -> Tensor:
    """Multiplies few rows on scales of blocks."""
    out = torch.empty((len(x), len(weight)), dtype=out_dtype, device=x.device)
    given = x, x_scales, weight, w_scales, bias, out
    if fp8_path(len(x), weight, w_scales) == "few":
        return fp8_few_rows(*given, few_fp8_tuning(x.device, len(x), *weight.shape), groups)
    tuning = fp8_tuning(x.device, len(x), *weight.shape, gated=False, blocks=True)
    return fp8_small_m(*given, tuning, groups=groups)


def fp8_small_m(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: Fp8Tuning,
    *,
    gated: bool = False,
    groups: int = 1,
) -> Tensor:
    """Computes [T, K] x [N, K] into `out` [T, N], or [T, N / 2] when `gated`.

    Args:
        x: e4m3 or int8 with scales, else half precision.
        x_scales: [T], or of each 128 inputs [K / 128, T or more].
        w_scales: [N], or of each 128 x 128 weights [N / 128, K / 128].
        groups: Of outputs, each of which has inputs of its own: x [T, groups * K].
    """
    num_rows, num_outputs = out.shape
    inner = weight.shape[1]
    blocks = w_scales.dim() == 2
    overlap = supports_pdl(x.device)
    partial = None
    if tuning.splits > 1:
        shape = (tuning.splits, 2 if gated else 1, num_rows, num_outputs)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    fp8_small_m_kernel[(num_outputs // tuning.cols, tuning.splits)](
        x,
        x_scales,
        weight,
        w_scales,
        bias,
        out,
        partial,
        _tickets(x.device),
        num_rows,
        num_outputs,
        num_outputs // groups,
        inner,
        x.stride(0),
        x_scales.stride(0) if blocks and x_scales is not None else 0,
        w_scales.stride(0),
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        SPLITS=tuning.splits,
        SWAP=tuning.swap,
        BLOCKS=blocks,
        GATED=gated,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        LINES=tuning.lines,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
