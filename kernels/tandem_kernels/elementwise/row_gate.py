"""The gate of a whole row: what a block has made of it, times the sigmoid of one product with it.

In plain torch it is ten launches around a few thousand numbers, a fifth of the step of one row of
Qwen3.5-35B-A3B.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.small_launches import in_turn, take_turn


@triton.jit
def row_gate_kernel(
    x: tl.tensor,
    given: tl.tensor,
    weight: tl.tensor,
    x_stride: tl.tensor,
    given_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Changes row t of `x` in program t. Its sums do not depend on other rows."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        own = tl.load(given + row * given_stride + start + lane, mask=inside, other=0.0)
        factor = tl.load(weight + start + lane, mask=inside, other=0.0)
        products += own.to(tl.float32) * factor.to(tl.float32)
    odds = 1.0 + tl.exp(-tl.sum(products, axis=0))
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        place = x + row * x_stride + start + lane
        value = tl.load(place, mask=inside, other=0.0)
        tl.store(place, (value.to(tl.float32) / odds).to(value.dtype), mask=inside)


def row_gate(x: Tensor, given: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gemm.row_gate`. The result lands in the memory of `x`."""
    num_tokens, width = x.shape
    if num_tokens > 0:
        row_gate_kernel[(num_tokens,)](
            x,
            given,
            weight,
            x.stride(0),
            given.stride(0),
            width,
            BLOCK=min(2048, triton.next_power_of_2(width)),
            num_warps=4,
            **in_turn(x.device, num_tokens),
        )
    return x
