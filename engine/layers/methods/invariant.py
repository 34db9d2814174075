"""GEMMs of deterministic mode: a row's bits do not depend on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.distributed import ParallelGroup
from engine.layers.methods.base import LinearLayer, Unquantised
from tandem_kernels import ops


class Invariant(Unquantised):
    """Computes each row in one order, and sums over ranks in one order."""

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return ops.invariant_gemm(x, layer.weight, layer.bias)

    def reduce(self, local: Tensor, group: ParallelGroup) -> Tensor:
        """Libraries change their way, and with it the order, with the size."""
        num_outputs = local.shape[-1]
        first, *others = torch.split(group.all_gather(local), num_outputs, dim=-1)
        for part in others:
            first = first + part
        return first.contiguous()
