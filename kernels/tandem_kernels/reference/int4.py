"""Multiplies by 4-bit weights in plain torch; their form is `int4_packing`'s."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.int4_packing import packed_group_size, unpack_numbers
from tandem_kernels.reference.elementwise import silu_and_mul
from tandem_kernels.reference.gemm import invariant_gemm


def int4_dequantise(packed: Tensor, groups: Tensor, num_inputs: int) -> Tensor:
    """Returns the weights, [N, K], in the type of the scales: rounded once, when the difference
    of number and zero is multiplied by the scale."""
    group_size = packed_group_size(packed, groups)
    numbers = unpack_numbers(packed, group_size).to(groups.dtype)
    scales, zeros = (part.t().repeat_interleave(group_size, 1) for part in groups.unbind(-1))
    weights: Tensor = (numbers - zeros) * scales
    return weights[:, :num_inputs].contiguous()


def int4_gemm(
    x: Tensor, packed: Tensor, groups: Tensor, bias: Tensor | None = None, fixed_order: bool = False
) -> Tensor:
    """Multiplies [T, K] by packed weights -> [T, N].

    Args:
        fixed_order: A row gets the same bits whatever the others are.
    """
    weight = int4_dequantise(packed, groups, x.shape[1])
    if not fixed_order:
        return F.linear(x, weight, bias)
    return invariant_gemm(x, weight, bias)


def int4_gate_up(x: Tensor, packed: Tensor, groups: Tensor, fixed_order: bool = False) -> Tensor:
    """Multiplies [T, K] by packed weights of 2 I outputs -> [T, I]: `silu(gate) * up`, where gate
    are the first I outputs."""
    return silu_and_mul(int4_gemm(x, packed, groups, None, fixed_order))
