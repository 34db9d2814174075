"""Gated activation of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import ahead_bytes, chains_launches
from tandem_kernels.narrow_shapes import MAX_ROWS
from tandem_kernels.prefetch import PROGRAMS, ask_for_rows, lines_of


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_kernel(
    x: tl.tensor,
    out: tl.tensor,
    ahead: tl.tensor,
    num_rows: tl.tensor,
    ahead_rows: tl.tensor,
    ahead_inner: tl.tensor,
    x_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (t, j) writes columns j * BLOCK and on of row t; those behind the rows ask for LINES
    lines of each row of `ahead`."""
    if LINES > 0:
        spare = tl.program_id(0) - num_rows
        if spare >= 0:
            mine = spare * tl.num_programs(1) + tl.program_id(1)
            others = (tl.num_programs(0) - num_rows) * tl.num_programs(1)
            ask_for_rows(ahead, mine, others, ahead_rows, ahead_inner, LINES, 128)
            if OVERLAP:
                gdc_wait()
                gdc_launch_dependents()
            return
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = wide / (1.0 + tl.exp(-wide)) * up
    tl.store(out + row * width + column, activated.to(gate.dtype), mask=inside)


def silu_and_mul(x: Tensor, ahead: Tensor | None = None) -> Tensor:
    """See `reference.elementwise.silu_and_mul`."""
    num_tokens, doubled = x.shape
    width = doubled // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens > 0:
        block = min(1024, triton.next_power_of_2(width))
        columns = triton.cdiv(width, block)
        lines = lines_of(ahead, ahead_bytes(x.device)) if num_tokens <= MAX_ROWS else 0
        spare = triton.cdiv(PROGRAMS, columns) if lines > 0 else 0
        grid = (num_tokens + spare, columns)
        overlap = chains_launches(x.device, num_tokens)
        silu_and_mul_kernel[grid](
            x,
            out,
            ahead if lines > 0 else None,
            num_tokens,
            ahead.shape[0] if ahead is not None else 0,
            ahead.shape[1] if ahead is not None else 0,
            x.stride(0),
            width,
            BLOCK=block,
            LINES=lines,
            OVERLAP=overlap,
            num_warps=4,
            **({"launch_pdl": True} if overlap else {}),
        )
    return out
