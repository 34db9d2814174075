"""Products that keep the sums of their GEMM: what is chosen by must not be rounded on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.gemm_policy import GemmPolicy
from tandem_kernels import ops
from tandem_kernels.device import is_gpu
from tandem_kernels.gemm import few_row_shapes


def float32_sums(x: Tensor, weight: Tensor, gemms: GemmPolicy) -> Tensor | None:
    """Multiplies [T, K] by [N, K] -> [T, N] float32. None: no GEMM of the device keeps its sums."""
    if gemms.deterministic:
        return ops.invariant_gemm(x, weight, None, torch.float32)
    if len(x) <= gemms.few_rows and few_row_shapes.takes(x, weight):
        return ops.few_row_gemm(x, weight, out_dtype=torch.float32)
    if is_gpu(x.device) and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return None
