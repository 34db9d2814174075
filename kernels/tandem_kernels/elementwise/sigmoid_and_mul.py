"""The gate behind attention."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.small_launches import in_turn, take_turn


@triton.jit
def sigmoid_and_mul_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Changes, in program (t, j), columns j * BLOCK and on of row t."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    wide = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    gated = value.to(tl.float32) / (1.0 + tl.exp(-wide))
    tl.store(x + row * x_stride + column, gated.to(value.dtype), mask=inside)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.elementwise.sigmoid_and_mul`. The result lands in the memory of `x`."""
    num_tokens, width = x.shape
    if num_tokens > 0:
        block = min(1024, triton.next_power_of_2(width))
        sigmoid_and_mul_kernel[(num_tokens, triton.cdiv(width, block))](
            x,
            gate,
            x.stride(0),
            gate.stride(0),
            width,
            BLOCK=block,
            num_warps=4,
            **in_turn(x.device, num_tokens),
        )
    return x
