"""RMSNorm of heads, and the gate behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl

ROWS = 8


@triton.jit(do_not_specialize=["num_rows"])
def gated_rms_norm_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program i, heads i * ROWS and on, counted over all tokens."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    real = (row < num_rows)[:, None] & (column < DIM)[None, :]
    place = row.to(tl.int64)[:, None] * DIM + column[None, :]
    scale = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    value = tl.load(x + place, mask=real, other=0.0)
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1) / DIM
    normed = wide * (1.0 / tl.sqrt_rn(mean_square + eps))[:, None] * scale[None, :]
    token, head = row // NUM_HEADS, row % NUM_HEADS
    gates = gate + (token.to(tl.int64) * gate_stride + head * DIM)[:, None] + column[None, :]
    steep = tl.load(gates, mask=real, other=0.0).to(tl.float32)
    gated = (normed if SIGMOID else normed * steep) / (1.0 + tl.exp(-steep))
    tl.store(out + place, gated.to(value.dtype), mask=real)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False
) -> Tensor:
    """See `reference.delta_rule.gated_rms_norm`."""
    num_tokens, num_heads, dim = x.shape
    out = torch.empty((num_tokens, num_heads * dim), dtype=x.dtype, device=x.device)
    num_rows = num_tokens * num_heads
    if num_rows > 0:
        overlap = uses_pdl(x.device, num_tokens)
        gated_rms_norm_kernel[(triton.cdiv(num_rows, ROWS),)](
            x.contiguous(),
            gate,
            weight,
            out,
            num_rows,
            gate.stride(0),
            eps,
            NUM_HEADS=num_heads,
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            ROWS=ROWS,
            SIGMOID=is_sigmoid,
            OVERLAP=overlap,
            num_warps=4,
            **({"launch_pdl": True} if overlap else {}),
        )
    return out
