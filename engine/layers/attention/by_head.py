"""Products of each head, or group of heads, with a weight of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels import ops


def by_head(x: Tensor, weight: Tensor, *, fixed_order: bool) -> Tensor:
    """Multiplies `x` [T, H, in], whose inputs are adjacent, by `weight` [H, in, out]: [T, H, out].
    `fixed_order`: a row's bits do not depend on the others."""
    num_heads, _, width = weight.shape
    if fixed_order:
        parts = [
            ops.invariant_gemm(x[:, head], weight[head].t().contiguous())
            for head in range(num_heads)
        ]
        return torch.stack(parts, dim=1)
    out = x.new_empty(len(x), num_heads, width)
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
