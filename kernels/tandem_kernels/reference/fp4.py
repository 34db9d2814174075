"""Multiplies by four-bit floats in plain torch; their form is `fp4_tiles`'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.gemm.fp4_tiles import SIDE, untile_fp4
from tandem_kernels.reference.elementwise import silu_and_mul
from tandem_kernels.reference.gemm import invariant_gemm
from tandem_kernels.reference.layouts import kernel_takes


@kernel_takes(tiles="_ _ _: int32", factors="_: float32")
def fp4_dequantise(
    tiles: Tensor, factors: Tensor | None, num_inputs: int, dtype: torch.dtype
) -> Tensor:
    """Returns the weights, [N, K], rounded once.

    Args:
        tiles: [N / 64, K / 64, words] int32.
        factors: Of NVFP4: [N] float32, by which the sums of products with tiles are multiplied.
    """
    return untile_fp4(tiles, len(tiles) * SIDE, num_inputs, factors).to(dtype)


@kernel_takes(x="T | _", tiles="_ _ _: int32", factors="N: float32", bias="N")
def fp4_gemm(
    x: Tensor,
    tiles: Tensor,
    factors: Tensor | None,
    bias: Tensor | None = None,
    fixed_order: bool = False,
) -> Tensor:
    """Multiplies [T, K] by tiles of N outputs -> [T, N].

    Args:
        factors: As in `fp4_dequantise`.
        fixed_order: A row gets the same bits whatever the others are.
    """
    weight = fp4_dequantise(tiles, factors, x.shape[1], x.dtype)
    if not fixed_order:
        return F.linear(x, weight, bias)
    return invariant_gemm(x, weight, bias)


@kernel_takes(x="T | _", tiles="_ _ _: int32", factors="N: float32")
def fp4_gate_up(
    x: Tensor, tiles: Tensor, factors: Tensor | None, fixed_order: bool = False
) -> Tensor:
    """Multiplies [T, K] by tiles of 2 I outputs -> [T, I]: `silu(gate) * up`, where gate are the
    first I outputs."""
    return silu_and_mul(fp4_gemm(x, tiles, factors, None, fixed_order))
