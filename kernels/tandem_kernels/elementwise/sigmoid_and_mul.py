"""The gate behind attention: what a head attends to, times the sigmoid or softplus of a gate."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.elementwise.softplus import softplus
from tandem_kernels.small_launches import in_turn, take_turn


@triton.jit
def gate_and_mul_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    width: tl.tensor,
    SHARED: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Changes, in program (t, j), columns j * BLOCK and on of row t. SHARED: this many neighbours
    have one gate."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    place = gate + row * gate_stride + column // SHARED
    wide = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if SOFTPLUS:
        gated = value.to(tl.float32) * softplus(wide)
    else:
        gated = value.to(tl.float32) / (1.0 + tl.exp(-wide))
    tl.store(x + row * x_stride + column, gated.to(value.dtype), mask=inside)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.elementwise.sigmoid_and_mul`. The result lands in the memory of `x`."""
    return _gated(x, gate, has_softplus=False)


def softplus_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.elementwise.softplus_and_mul`. The result lands in the memory of `x`."""
    return _gated(x, gate, has_softplus=True)


def _gated(x: Tensor, gate: Tensor, *, has_softplus: bool) -> Tensor:
    num_tokens, width = x.shape
    if num_tokens > 0:
        block = min(1024, triton.next_power_of_2(width))
        gate_and_mul_kernel[(num_tokens, triton.cdiv(width, block))](
            x,
            gate,
            x.stride(0),
            gate.stride(0),
            width,
            SHARED=width // gate.shape[1],
            SOFTPLUS=has_softplus,
            BLOCK=block,
            num_warps=4,
            **in_turn(x.device, num_tokens),
        )
    return x
