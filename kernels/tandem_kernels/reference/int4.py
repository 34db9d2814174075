"""Multiplies by 4-bit weights in plain torch; their form is `int4_packing`'s."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.gemm.int4_packing import packed_group_size, unpack_numbers
from tandem_kernels.reference.elementwise import silu_and_mul
from tandem_kernels.reference.experts import fused_experts
from tandem_kernels.reference.gemm import invariant_gemm
from tandem_kernels.reference.layouts import kernel_takes


@kernel_takes(packed="N _: int16", groups="_ N 2")
def int4_dequantise(packed: Tensor, groups: Tensor, num_inputs: int) -> Tensor:
    """Returns the weights, [N, K], in the type of the scales: rounded once, when the difference
    of number and zero is multiplied by the scale."""
    group_size = packed_group_size(packed, groups)
    numbers = unpack_numbers(packed, group_size).to(groups.dtype)
    scales, zeros = (part.t().repeat_interleave(group_size, 1) for part in groups.unbind(-1))
    weights: Tensor = (numbers - zeros) * scales
    return weights[:, :num_inputs].contiguous()


@kernel_takes(x="T | K", packed="N _: int16", groups="_ N 2", bias="N")
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


@kernel_takes(x="T | K", packed="N _: int16", groups="_ N 2")
def int4_gate_up(x: Tensor, packed: Tensor, groups: Tensor, fixed_order: bool = False) -> Tensor:
    """Multiplies [T, K] by packed weights of 2 I outputs -> [T, I]: `silu(gate) * up`, where gate
    are the first I outputs."""
    return silu_and_mul(int4_gemm(x, packed, groups, None, fixed_order))


@kernel_takes(
    x="T | H",
    packed13="E N _: int16",
    groups13="E _ N 2",
    packed2="E H _: int16",
    groups2="E _ H 2",
    weights="T k: float32",
    experts="T k: int32",
)
def int4_experts(
    x: Tensor,
    packed13: Tensor,
    groups13: Tensor,
    packed2: Tensor,
    groups2: Tensor,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """Computes the weighted sum of each token's experts, as `fused_experts` does.

    Args:
        x: [T, H].
        packed13, groups13: [E, 2 I, H' / 4] and [E, H' / G, 2 I, 2], of each expert its gate, then
            its up projection.
        packed2, groups2: [E, H, I' / 4] and [E, I' / G, H, 2].
        weights, experts, fixed_order, summed, ranks: As in `fused_experts`.

    Returns:
        What `fused_experts` returns.
    """
    used = sorted(set(experts.flatten().tolist()) - {-1})
    place = {expert: index for index, expert in enumerate(used)}
    chosen = torch.tensor([place.get(e, -1) for e in experts.flatten().tolist()])
    if not used:
        return x.new_zeros((len(x) if summed else experts.numel(), x.shape[1]))
    width = packed13.shape[1] // 2
    w13 = torch.stack([int4_dequantise(packed13[e], groups13[e], x.shape[1]) for e in used])
    w2 = torch.stack([int4_dequantise(packed2[e], groups2[e], width) for e in used])
    own = chosen.view(experts.shape).to(experts)
    return fused_experts(x, w13, w2, weights, own, fixed_order, summed=summed)
