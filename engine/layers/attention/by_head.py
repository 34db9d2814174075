"""Products of each head, or group of heads, with a weight of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels import ops
from tandem_kernels.gemm import few_row_shapes


def by_head(x: Tensor, weight: Tensor, *, fixed_order: bool, few_rows: int = 0) -> Tensor:
    """Multiplies `x` [T, H, in], whose inputs are adjacent, by `weight` [H, in, out]: [T, H, out].

    Args:
        fixed_order: A row's bits do not depend on the others.
        few_rows: At most this many have a kernel of their own.
    """
    num_heads, _, width = weight.shape
    if fixed_order:
        parts = [
            ops.invariant_gemm(x[:, head], weight[head].t().contiguous())
            for head in range(num_heads)
        ]
        return torch.stack(parts, dim=1)
    if len(x) <= few_rows and few_row_shapes.takes_by_head(x, weight):
        return ops.head_gemm(x, weight)
    out = x.new_empty(len(x), num_heads, width)
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
