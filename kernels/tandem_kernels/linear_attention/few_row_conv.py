"""A projection of few rows and the short convolution behind it, in one launch.

    rows ─ products ─┬─ channels: convolved with what their request kept, which is replaced ─▶
                     └─ other outputs ─────────────────────────────────────────────────────────▶

A program has whole outputs, so no other reads or writes what was kept of its channels. That, and
the first weights, are on their way before the kernel in front has ended (PDL).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.device import uses_pdl
from tandem_kernels.gemm.few_row_gemm import (
    few_row_tuning,
    load_words,
    products_in_registers,
    word_places,
)


@triton.jit(do_not_specialize=["num_rows"])
def few_row_conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    taps: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    first: tl.tensor,
    num_channels: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program j, outputs j * COLS and on of all rows, each of which is a request's
    only token. Outputs `first` and on are the channels."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, DEPTH // 2)
    if OVERLAP:
        gdc_launch_dependents()
    places = word_places(weight, tl.minimum(col, num_outputs - 1), INNER, lane)
    inputs = word_places(x, tl.minimum(row, num_rows - 1), x_stride, lane)
    ahead = load_words(places, lane, 0, DEPTH // 2, INNER)
    channel = col - first
    is_channel = (channel >= 0) & (channel < num_channels)
    seq_len = tl.load(seq_lens + row, mask=row < num_rows, other=0)
    block = tl.load(blocks + row, mask=seq_len > 0, other=0).to(tl.int64)
    kept = states + block[None, :] * state_stride + channel[:, None] * (WIDTH - 1)
    goes_on = is_channel[:, None] & (seq_len > 1)[None, :]
    total = tl.zeros([COLS, ROWS], tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        factor = tl.load(taps + channel * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
        old = tl.load(kept + tap, mask=goes_on, other=0.0)
        total += old.to(tl.float32) * factor[:, None]
    last = tl.load(taps + channel * WIDTH + WIDTH - 1, mask=is_channel, other=0.0).to(tl.float32)
    added = 0.0
    if HAS_BIAS:
        added = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[:, None]
    acc, _ = products_in_registers(
        ahead, places, inputs, None, lane, COLS, ROWS, DEPTH // 2, INNER,
        weight.dtype.element_ty, False, OVERLAP,
    )  # fmt: skip
    kind = out.dtype.element_ty
    own = acc.to(kind)
    total += own.to(tl.float32) * last[:, None] + added
    total = total / (1.0 + tl.exp(-total))
    given = tl.where(is_channel[:, None], total, own.to(tl.float32)).to(kind)
    real = (col < num_outputs)[:, None] & (row < num_rows)[None, :]
    tl.store(out + row.to(tl.int64)[None, :] * num_outputs + col[:, None], given, mask=real)
    written = is_channel[:, None] & (seq_len > 0)[None, :]
    for tap in tl.static_range(WIDTH - 2):
        old = tl.load(kept + tap + 1, mask=goes_on, other=0.0)
        # What is replaced has been read by all threads.
        tl.debug_barrier()
        tl.store(kept + tap, old, mask=written)
    tl.debug_barrier()
    tl.store(kept + WIDTH - 2, own.to(states.dtype.element_ty), mask=written)


def few_row_conv(
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    first: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """See `reference.delta_rule.few_row_conv`; only for what `few_row_conv_shapes` says."""
    num_rows, (num_outputs, inner), width = len(x), weight.shape, taps.shape[1]
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tuning = few_row_tuning(x.device, num_rows, num_outputs, inner)
    overlap = uses_pdl(x.device, num_rows)
    few_row_conv_kernel[(triton.cdiv(num_outputs, tuning.cols),)](
        x,
        weight,
        taps,
        bias,
        states,
        metadata.blocks,
        metadata.seq_lens,
        out,
        num_rows,
        num_outputs,
        first,
        len(taps),
        x.stride(0),
        states.stride(0),
        ROWS=triton.next_power_of_2(num_rows),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        INNER=inner,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        **tuning.options,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
