"""Writes weights of e4m3 out as plain numbers, for one GEMM of the library."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.reference.fp8 import BLOCK

_ROWS = 32


@triton.jit
def fp8_dequantise_kernel(
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    scales_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes, in program (i, j), inputs j * BLOCK and on of outputs i * ROWS and on."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * inner + column[None, :]
    scale = tl.load(scales + tl.program_id(0) * ROWS // BLOCK * scales_stride + tl.program_id(1))
    tl.store(out + at, (tl.load(weight + at).to(tl.float32) * scale).to(out.dtype.element_ty))


def fp8_dequantise(weight: Tensor, w_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.fp8_linear.fp8_dequantise`."""
    num_outputs, inner = weight.shape
    out = torch.empty((num_outputs, inner), dtype=dtype, device=weight.device)
    fp8_dequantise_kernel[(num_outputs // _ROWS, inner // BLOCK)](
        weight, w_scales, out, inner, w_scales.stride(0), ROWS=_ROWS, BLOCK=BLOCK, num_warps=4
    )
    return out
