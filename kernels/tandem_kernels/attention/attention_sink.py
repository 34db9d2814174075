"""Attention sinks: a logit of each query head that takes part in the softmax, and has no value."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
"""Rows of a program: with heads of 64 numbers in half precision, 8 KiB."""


@triton.jit
def sink_of(sinks: tl.tensor, head: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Loads the sinks of heads that are `real`. Kernels of few rows do so early: no other kernel
    reads these, so they come from memory, not from a cache."""
    return tl.load(sinks + head, mask=real, other=float("-inf"))


@triton.jit
def with_sink(total: tl.tensor, peak: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Returns the sum of a complete softmax state with a sink in it.

    Once for each query row, behind all keys and behind a merge. A sink is no score, so the scale
    does not apply; the state is in powers of two. A sink far above `peak` makes the sum infinite,
    and what the row attends to zero, as it is.
    """
    return total + tl.exp2(sink * 1.4426950408889634 - peak)


@triton.jit(
    do_not_specialize=["num_rows", "log_sums_stride"], do_not_specialize_on_alignment=["log_sums"]
)
def add_sinks_kernel(
    attended: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    num_rows: tl.tensor,
    log_sums_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Changes `ROWS` rows in each program; row r is of token r // NUM_HEADS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    token, head = row // NUM_HEADS, row % NUM_HEADS
    log_sum = tl.load(log_sums + head * log_sums_stride + token, mask=real, other=0.0)
    share = 1.0 / (1.0 + tl.exp(tl.load(sinks + head, mask=real, other=0.0) - log_sum))
    dim = tl.arange(0, BLOCK_VALUE)
    place = attended + row[:, None] * VALUE + dim[None, :]
    inside = real[:, None] & (dim < VALUE)[None, :]
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * share[:, None]
    tl.store(place, value.to(attended.dtype.element_ty), mask=inside)


def add_sinks(attended: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """See `reference.ragged.add_sinks`."""
    num_tokens, num_heads, value = attended.shape
    num_rows = num_tokens * num_heads
    add_sinks_kernel[(triton.cdiv(num_rows, _ROWS),)](
        attended,
        log_sums,
        sinks,
        num_rows,
        log_sums.stride(0),
        NUM_HEADS=num_heads,
        VALUE=value,
        BLOCK_VALUE=triton.next_power_of_2(value),
        ROWS=_ROWS,
        num_warps=4,
    )
