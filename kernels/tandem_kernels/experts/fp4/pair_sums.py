"""The sums over what programs of `pairs` have written, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.part_sums import sum_of_parts


@triton.jit
def sum_of_pairs(
    sums: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    token: tl.tensor,
    col: tl.tensor,
    real: tl.tensor,
    width: tl.tensor,
    num_pairs: tl.tensor,
    TOP_K: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Sums the outputs of a token's pairs in their order, each by its weight."""
    total = tl.zeros([COLS], tl.float32)
    for other in tl.static_range(TOP_K):
        mate = token * TOP_K + other
        of = tl.load(experts + mate)
        counts = real & (of >= 0)
        place = sums + mate.to(tl.int64) * width + col
        outputs = sum_of_parts(place, num_pairs.to(tl.int64) * width, counts, SPLITS)
        if HAS_BIAS:
            of_col = bias + of.to(tl.int64) * width + col
            outputs += tl.load(of_col, mask=counts, other=0.0).to(tl.float32)
        total += outputs * tl.load(pair_weights + mate)
    return total


@triton.jit
def added(to: tl.tensor, total: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Adds rounded sums to what is at `to`, and rounds again, as a norm does that they wait for."""
    carried = tl.load(to, mask=real, other=0.0).to(tl.float32)
    return (total.to(tl.float32) + carried).to(total.dtype)
