"""GEMMs with 4-bit weights (`int4_packing`), which become half precision in registers.

With few rows reading the weights is all that takes time, so a program reads a strip of them once,
in pieces that are on their way before they are needed. It starts before its predecessor has ended
(PDL), and while it waits for that, memory brings its weights into the L2 cache. Where outputs are
few, the inner dimension is split, too: the last program of a strip to arrive sums the parts, in the
order of the dimension, so the result does not depend on who that was. Many rows are faster by
`int4_dequantise` and the library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.cache_lines import prefetch_lines
from tandem_kernels.device import supports_pdl
from tandem_kernels.gemm.int4_packing import block_size, packed_group_size
from tandem_kernels.gemm.int4_tiles import gate_and_up, multiplied_strip, strip_columns
from tandem_kernels.gemm.int4_tuning import FIXED, Int4Tuning, int4_tuning
from tandem_kernels.stream_lanes import lane_counters

MAX_STRIPS = 1 << 14
"""More than GEMMs whose inner dimension is split have."""


_LINE_BYTES = tl.constexpr(128)
"""A prefetch brings this much: the numbers of 256 inputs."""


@triton.jit
def _bring_into_cache(
    strip: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """Prefetches the first LINES lines of blocks [first, last) of each output, and their groups;
    `words` point to the first groups of the outputs, one in a line."""
    byte = first * (BLOCK // 2) + tl.arange(0, LINES) * _LINE_BYTES
    byte = tl.maximum(tl.minimum(byte, last * (BLOCK // 2) - _LINE_BYTES), 0)
    prefetch_lines(strip.to(tl.pointer_type(tl.int8))[:, None] + byte[None, :])
    per_line: tl.constexpr = 2 * _LINE_BYTES // GROUP
    group = first * (BLOCK // GROUP) + tl.arange(0, LINES * per_line)
    group = tl.minimum(group, last * (BLOCK // GROUP) - 1)
    prefetch_lines(words[None, :] + group.to(tl.int64)[:, None] * width)


@triton.jit(do_not_specialize=["num_rows"])
def int4_gemm_kernel(
    x: tl.tensor,
    packed: tl.tensor,
    groups: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    num_blocks: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Computes, in program (i, j, s), tile i of outputs and j of rows over part s of the blocks.

    `groups` are 32-bit words. When GATED, `packed` has twice as many outputs, and a strip half as
    many (`strip_columns`).
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real_row = row < num_rows
    col, real_col = strip_columns(tl.program_id(0), num_outputs, COLS, GATED)
    width = 2 * num_outputs if GATED else num_outputs
    strip = packed + col.to(tl.int64) * (num_blocks * (BLOCK // 4))
    words = groups + col
    first_block = tl.program_id(2) * num_blocks // SPLITS
    last_block = (tl.program_id(2) + 1) * num_blocks // SPLITS
    if OVERLAP:
        gdc_launch_dependents()
        if AHEAD > 0:
            near_strip, near_words = strip, words
            if not EVEN:
                near_strip = tl.where(real_col, strip, packed)
                near_words = tl.where(real_col, words, groups)
            blocks = first_block, last_block
            _bring_into_cache(near_strip, near_words, width, *blocks, BLOCK, GROUP, AHEAD)
        gdc_wait()
    acc = multiplied_strip(
        x + row.to(tl.int64) * x_stride,
        strip,
        words,
        real_row,
        real_col,
        inner,
        width,
        first_block,
        last_block,
        ROWS,
        COLS,
        BLOCK,
        GROUP,
        SWAPPED,
        EVEN,
        IN_PAIRS,
        LATE,
        LANES,
    )
    if SPLITS > 1:
        real = real_row[:, None] & real_col[None, :]
        place = row.to(tl.int64)[:, None] * width + col[None, :]
        size = num_rows.to(tl.int64) * width
        tl.store(parts + tl.program_id(2) * size + place, acc, mask=real)
        tl.debug_barrier()
        strip_index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrived + strip_index, 1) < SPLITS - 1:
            return
        tl.store(arrived + strip_index, 0)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(parts + split * size + place, mask=real, other=0.0, cache_modifier=".cg")
    to_kind: tl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=real_col, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = gate_and_up(acc, ROWS, COLS)
        gate = gate.to(to_kind).to(tl.float32)
        out_acc = gate / (1.0 + tl.exp(-gate)) * up.to(to_kind).to(tl.float32)
        out_col = tl.program_id(0) * (COLS // 2) + tl.arange(0, COLS // 2)
    else:
        out_acc = acc
        out_col = col
    to = out + row.to(tl.int64)[:, None] * num_outputs + out_col[None, :]
    written = real_row[:, None] & (out_col < num_outputs)[None, :]
    tl.store(to, out_acc.to(to_kind), mask=written)


def int4_gemm(
    x: Tensor, packed: Tensor, groups: Tensor, bias: Tensor | None = None, fixed_order: bool = False
) -> Tensor:
    """See `reference.int4.int4_gemm`; halves only."""
    out = torch.empty((x.shape[0], packed.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, packed, groups, bias, out, None if not fixed_order else FIXED, gated=False)
    return out


def int4_gate_up(x: Tensor, packed: Tensor, groups: Tensor, fixed_order: bool = False) -> Tensor:
    """See `reference.int4.int4_gate_up`; halves only."""
    out = torch.empty((x.shape[0], packed.shape[0] // 2), dtype=x.dtype, device=x.device)
    launch(x, packed, groups, None, out, None if not fixed_order else FIXED, gated=True)
    return out


def launch(
    x: Tensor,
    packed: Tensor,
    groups: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: Int4Tuning | None,
    *,
    gated: bool,
) -> None:
    """Computes `out` [T, N], of `packed` with N outputs, or with 2 N when `gated`.

    Args:
        tuning: None: the one of this shape.
    """
    num_rows, num_outputs = out.shape
    if num_rows == 0:
        return
    inner = x.shape[1]
    group_size = packed_group_size(packed, groups)
    block = block_size(group_size)
    num_blocks = packed.shape[1] * 4 // block
    tuning = tuning or int4_tuning(x.device, num_rows, num_outputs, inner, gated=gated)
    cols = tuning.cols // 2 if gated else tuning.cols
    strips = triton.cdiv(num_outputs, cols), triton.cdiv(num_rows, tuning.rows)
    parts = arrived = None
    if tuning.splits > 1:
        parts = torch.empty(
            (tuning.splits, num_rows, packed.shape[0]), dtype=torch.float32, device=x.device
        )
        arrived = _arrival_counts(x.device)
    overlap = supports_pdl(x.device)
    int4_gemm_kernel[(*strips, tuning.splits)](
        x,
        packed,
        groups.view(torch.int32),
        bias,
        out,
        parts,
        arrived,
        num_rows,
        num_outputs,
        inner,
        num_blocks,
        x.stride(0),
        ROWS=tuning.rows,
        COLS=tuning.cols,
        BLOCK=block,
        GROUP=group_size,
        SPLITS=tuning.splits,
        SWAPPED=tuning.swapped,
        GATED=gated,
        HAS_BIAS=bias is not None,
        EVEN=inner % block == 0 and num_outputs % cols == 0,
        IN_PAIRS=x.is_cuda,
        OVERLAP=overlap,
        AHEAD=tuning.ahead,
        LATE=tuning.late,
        LANES=block // 4 // tuning.pieces,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )


def _arrival_counts(device: torch.device) -> Tensor:
    """Returns a counter for each strip, zero between kernels of a lane."""
    return lane_counters("int4_gemm", MAX_STRIPS, device)
