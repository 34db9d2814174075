"""Gated activations of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.soft_cap import soft_capped
from tandem_kernels.device import uses_pdl
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments


@triton.jit
def silu_and_mul_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    width: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    LIMITED: tl.constexpr,
    CLAMPED: tl.constexpr,
    CAPPED: tl.constexpr,
    SITU: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Writes, in program (t, j), columns j * BLOCK and on of row t."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    # GELU's tanh formula is SiLU of another argument: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)).
    if CLAMPED or CAPPED:
        wide = tl.minimum(wide, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if CLAMPED:
        up = up + 1.0
    steep = wide
    if CLAMPED:
        steep = alpha * wide
    if GELU:
        steep = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    factor = wide
    if SITU:
        factor = soft_capped(wide, alpha)
        up = soft_capped(up, limit)
    activated = factor / (1.0 + tl.exp(-steep))
    if LIMITED:
        activated = tl.minimum(activated, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    activated = activated * up
    tl.store(out + row * width + column, activated.to(gate.dtype), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `reference.elementwise.silu_and_mul`."""
    return _activate(x, is_gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See `reference.elementwise.gelu_tanh_and_mul`."""
    return _activate(x, is_gelu=True)


def bounded_gate_and_mul(x: Tensor, form: GateForm) -> Tensor:
    """See `reference.elementwise.bounded_gate_and_mul`."""
    return _activate(x, is_gelu=False, form=form)


def _activate(x: Tensor, *, is_gelu: bool, form: GateForm | None = None) -> Tensor:
    num_tokens, doubled = x.shape
    width = doubled // 2
    kind = "" if form is None else form.kind
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens > 0:
        block = min(1024, triton.next_power_of_2(width))
        grid = (num_tokens, triton.cdiv(width, block))
        overlap = uses_pdl(x.device, num_tokens)
        silu_and_mul_kernel[grid](
            x,
            out,
            x.stride(0),
            width,
            *gate_arguments(form),
            BLOCK=block,
            GELU=is_gelu,
            LIMITED=kind == "limited",
            CLAMPED=kind == "clamped",
            CAPPED=kind == "capped",
            SITU=kind == "situ",
            OVERLAP=overlap,
            num_warps=4,
            **({"launch_pdl": True} if overlap else {}),
        )
    return out
