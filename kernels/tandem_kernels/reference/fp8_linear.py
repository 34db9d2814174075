"""Linear layers on FP8 weights, step by step in plain torch.

An unscaled product is a GEMM of e4m3 numbers alone; row t and output n of it are still to be
multiplied by `row_scales[0, t]` and `col_scales[n]`, which its reader does. Blocks of
128 x 128 weights beside groups of 128 inputs are those of DeepSeek-V3 (arXiv 2412.19437, 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.reference.elementwise import (
    fused_add_rms_norm,
    gelu_tanh_and_mul,
    rms_norm,
    silu_and_mul,
)
from tandem_kernels.reference.fp8 import dequantise_rows, dequantise_weight, quantise_fp8
from tandem_kernels.reference.layouts import kernel_takes


@kernel_takes(
    x="T | H", residual="T | H", weight="H", row_scales="1 T: float32", col_scales="H: float32"
)
def rms_norm_fp8(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int | None = 0,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises rows and quantises the norm as `quantise_fp8` does.

    Args:
        x: [T, H]; with scales an unscaled product.
        residual: [T, H] or None; changed in place to the sum with `x`, which is then normalised.
        group: See `quantise_fp8`; None: the norm stays plain, of the dtype of `x`.

    Returns:
        Numbers and scales; of a plain norm no scales.
    """
    if row_scales is not None and col_scales is not None:
        x = scale_product(x, row_scales, col_scales)
    if residual is None:
        normed = rms_norm(x, weight, eps)
    else:
        normed = fused_add_rms_norm(x, residual, weight, eps)[0]
    if group is None:
        return normed, normed.new_empty(0)
    return quantise_fp8(normed, group)


@kernel_takes(x="T | W", row_scales="1 T: float32", col_scales="W: float32")
def silu_and_mul_fp8(
    x: Tensor,
    is_gelu: bool = False,
    group: int = 0,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes a gated activation [T, 2 I] -> [T, I], quantised as `quantise_fp8` does; with scales
    x is an unscaled product."""
    if row_scales is not None and col_scales is not None:
        x = scale_product(x, row_scales, col_scales)
    return quantise_fp8(gelu_tanh_and_mul(x) if is_gelu else silu_and_mul(x), group)


@kernel_takes(x="T | K", weight="N K")
def fp8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies e4m3 numbers [T, K] x [N, K] -> the unscaled product in bfloat16, [T, N]."""
    return (x.float() @ weight.float().t()).to(torch.bfloat16)


@kernel_takes(product="T N", row_scales="1 T: float32", col_scales="N: float32", bias="N")
def scale_product(
    product: Tensor, row_scales: Tensor, col_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Scales an unscaled product [T, N], whose memory may be reused, and adds the bias."""
    scaled = product.float() * row_scales.view(-1, 1) * col_scales
    return (scaled if bias is None else scaled + bias.float()).to(product.dtype)


@kernel_takes(
    x="T K",
    x_scales="_ | T: float32",
    weight="N K",
    w_scales="N: float32 or _ | _: float32",
    bias="N",
)
def fp8_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies [T, K] x [N, K] -> [T, N].

    Args:
        x: e4m3.
        x_scales: As `quantise_fp8` gives them: [1, T] beside w_scales [N], else of each 128
            inputs, [K / 128, T].
        weight, w_scales: See `dequantise_weight`.
    """
    exact = dequantise_rows(x, x_scales) @ dequantise_weight(weight, w_scales).t()
    return (exact if bias is None else exact + bias.float()).to(out_dtype)


@kernel_takes(x="T | _", x_scales="_ | T: float32", weight="_ _", w_scales="_ | _: float32")
def fp8_group_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies each group of inputs by the weights of its own outputs: [T, groups * K] x
    [groups * N, K] -> [T, groups * N], scales of blocks as `fp8_gemm` takes them."""
    wide = dequantise_rows(x, x_scales).view(len(x), groups, -1)
    of_group = dequantise_weight(weight, w_scales).view(groups, -1, weight.shape[1])
    return torch.einsum("tgk,gnk->tgn", wide, of_group).flatten(1).to(out_dtype)


@kernel_takes(weight="_ _", w_scales="_ | _: float32")
def fp8_dequantise(weight: Tensor, w_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns weights [N, K], whose scales are of blocks, in `dtype`."""
    return dequantise_weight(weight, w_scales).to(dtype)


@kernel_takes(
    x="T K", x_scales="_ | T: float32", weight="N K", w_scales="N: float32 or _ | _: float32"
)
def fp8_gate_up(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Computes [T, K] x [2 I, K] -> [T, I]: `silu(gate) * up`, where gate are the first I
    outputs."""
    return silu_and_mul(fp8_gemm(x, x_scales, weight, w_scales, None, out_dtype))
