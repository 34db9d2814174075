"""INT8 in plain torch: rows quantised by their largest number, and exact products of integers."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.reference.elementwise import gelu_tanh_and_mul, silu_and_mul
from tandem_kernels.reference.experts import activated, of_tokens
from tandem_kernels.reference.fp8_linear import rms_norm_fp8, scale_product
from tandem_kernels.reference.layouts import kernel_takes

INT8_MAX = 127.0
"""The largest number of a quantised row; -128 is left out, as publishers leave it out."""


@kernel_takes(x="T | K")
def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows, each by its largest number.

    Args:
        x: [T, K].

    Returns:
        int8 numbers [T, K], and float32 scales [1, T]. Of a row the largest number becomes 127;
        zeros alone have scale 1.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / INT8_MAX, 1.0)
    numbers = (wide / scales[:, None]).round().clamp(-INT8_MAX, INT8_MAX)
    return numbers.to(torch.int8), scales[None]


@kernel_takes(
    x="T | H", residual="T | H", weight="H", row_scales="1 T: float32", col_scales="H: float32"
)
def rms_norm_int8(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises rows as `rms_norm_fp8` does, and quantises the norm as `quantise_int8` does."""
    plain = rms_norm_fp8(x, residual, weight, eps, None, row_scales, col_scales)[0]
    return quantise_int8(plain)


@kernel_takes(x="T | W", row_scales="1 T: float32", col_scales="W: float32")
def silu_and_mul_int8(
    x: Tensor,
    is_gelu: bool = False,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes a gated activation [T, 2 I] -> [T, I], quantised as `quantise_int8` does; with
    scales x is an unscaled product."""
    if row_scales is not None and col_scales is not None:
        x = scale_product(x, row_scales, col_scales)
    return quantise_int8(gelu_tanh_and_mul(x) if is_gelu else silu_and_mul(x))


@kernel_takes(
    x="T K: int8", x_scales="1 T: float32", weight="N K: int8", w_scales="N: float32", bias="N"
)
def int8_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies [T, K] x [N, K] -> [T, N]: sums of integers are exact, and are then scaled.

    Args:
        x, x_scales: As `quantise_int8` gives them.
        weight: int8.
        w_scales: [N].
    """
    scaled = _product(x, weight) * w_scales * x_scales.view(-1, 1)
    return (scaled if bias is None else scaled + bias.float()).to(out_dtype)


@kernel_takes(x="T K: int8", x_scales="1 T: float32", weight="N K: int8", w_scales="N: float32")
def int8_gate_up(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Computes [T, K] x [2 I, K] -> [T, I]: `silu(gate) * up`, where gate are the first I
    outputs."""
    return silu_and_mul(int8_gemm(x, x_scales, weight, w_scales, None, out_dtype))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies integers: a sum of float64 is exact. Returns float32."""
    return (x.double() @ weight.double().t()).float()


@kernel_takes(weight="N K: int8", scales="G N: float32", zeros="G N: int8")
def int8_dequantise(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns weights [N, K] in `dtype`: (number - zero) * scale, rounded once.

    Args:
        weight: [N, K] int8.
        scales: [G, N] float32, of K / G inputs each.
        zeros: [G, N] int8, or None: 0.
    """
    size = weight.shape[1] // len(scales)
    wide = weight.float()
    if zeros is not None:
        wide = wide - zeros.t().float().repeat_interleave(size, 1)
    return (wide * scales.t().repeat_interleave(size, 1)).to(dtype)


@kernel_takes(x="T | K", weight="N K: int8", scales="G N: float32", zeros="G N: int8", bias="N")
def int8_weight_gemm(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Multiplies rows in half precision, [T, K], by weights as `int8_dequantise` has them ->
    [T, N]."""
    exact = x.float() @ int8_dequantise(weight, scales, zeros, torch.float32).t()
    return (exact if bias is None else exact + bias.float()).to(x.dtype)


@kernel_takes(x="T | K", weight="N K: int8", scales="G N: float32", zeros="G N: int8")
def int8_weight_gate_up(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Multiplies [T, K] by weights of 2 I outputs -> [T, I]: `silu(gate) * up`, where gate are the
    first I outputs."""
    return silu_and_mul(int8_weight_gemm(x, weight, scales, zeros))


@kernel_takes(
    x="T | H",
    w13="E N H: int8",
    s13="E N: float32",
    w2="E H _: int8",
    s2="E H: float32",
    weights="T k: float32",
    experts="T k: int32",
)
def int8_experts(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    weights: Tensor,
    experts: Tensor,
    quantises: bool,
    fixed_order: bool = False,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """Computes the weighted sum of each token's experts, as `fused_experts` does.

    Args:
        x: [T, H].
        w13: [E, 2 I, H] int8: of each expert its gate, then its up projection.
        s13: [E, 2 I] float32, a scale for each output.
        w2: [E, H, I] int8.
        s2: [E, H].
        weights, experts, fixed_order, summed, ranks: As in `fused_experts`.
        quantises: What goes into either projection is quantised by `quantise_int8`.

    Returns:
        What `fused_experts` returns.
    """

    def projected(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        if not quantises:
            return (rows.double() @ weight.double().t() * scales.double()).float()
        numbers, shares = quantise_int8(rows)
        return _product(numbers, weight) * scales * shares.view(-1, 1)

    outputs = x.new_zeros((*experts.shape, x.shape[1]), dtype=torch.float32)
    for expert in sorted(set(experts.flatten().tolist()) - {-1}):
        token, place = torch.where(experts == expert)
        gates, ups = projected(x[token], w13[expert], s13[expert]).chunk(2, -1)
        part = projected(activated(gates, ups, None).to(x.dtype), w2[expert], s2[expert])
        outputs[token, place] = part * weights[token, place, None]
    return of_tokens(outputs, summed).to(x.dtype)
