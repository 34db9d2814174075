"""RMSNorm, alone and fused with the addition to the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl


@triton.jit
def normed_row(value: tl.tensor, scale: tl.tensor, width: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """Returns the norm of a row of `width` numbers, with zeros behind them, in float32."""
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / width
    return wide * (1.0 / tl.sqrt_rn(mean_square + eps)) * scale


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    hidden_size: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Normalises one row in each program. With a residual, its row becomes the sum, and the sum is
    normalised. The next kernel begins when the ones in front have ended: `route_tokens` says why.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    kind = out.dtype.element_ty
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + column
        carried = tl.load(place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + carried.to(tl.float32)).to(kind)
        tl.store(place, value, mask=inside)
    normed = normed_row(value, scale, hidden_size, eps)
    tl.store(out + row * out_stride + column, normed.to(kind), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.elementwise.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden_size = x.shape[-1]
    rows = x.view(-1, hidden_size)
    if rows.shape[0] > 0:
        _launch(rows, None, weight, out.view(-1, hidden_size), eps)
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.elementwise.fused_add_rms_norm`. The norm lands in the memory of `x`."""
    if x.shape[0] > 0:
        _launch(x, residual, weight, x, eps)
    return x, residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    num_rows, hidden_size = x.shape
    block = triton.next_power_of_2(hidden_size)
    overlap = uses_pdl(x.device, num_rows)
    rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        hidden_size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(max(block // 512, 1), 16),
        **({"launch_pdl": True} if overlap else {}),
    )
