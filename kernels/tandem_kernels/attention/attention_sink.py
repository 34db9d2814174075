"""Attention sinks: a logit of each query head that takes part in the softmax, and has no value."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def with_sink(
    total: tl.tensor, peak: tl.tensor, sinks: tl.tensor, head: tl.tensor, real: tl.tensor
) -> tl.tensor:
    """Returns the sum of a complete softmax state with the sink of `head` in it.

    Once for each query row, behind all keys and behind a merge. A sink is no score, so the scale
    does not apply; the state is in powers of two. A sink far above `peak` makes the sum infinite,
    and what the row attends to zero, as it is.
    """
    sink = tl.load(sinks + head, mask=real, other=float("-inf"))
    return total + tl.exp2(sink * 1.4426950408889634 - peak)
