"""GEMMs of few rows, of gate and up, of queries, keys and values, and such as do not depend on the
batch, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.reference.elementwise import rms_norm, rope_and_cache, silu_and_mul
from tandem_kernels.reference.layouts import Fields, kernel_takes

_QKV: Fields = {
    "bias": "N",
    "positions": "T: int",
    "cos_sin_cache": "_ D: float32",
    "kv_cache": "B 2 | _ _ D",
    "slot_mapping": "T: int",
}
_ROWS = 16


@kernel_takes(x="T | K", weight="N K", bias="N")
def small_m_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies [T, K] x [N, K] -> [T, N], for few rows T."""
    return F.linear(x, weight, bias)


@kernel_takes(x="T | K", weight="_ K")
def small_m_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies [T, K] x [2 I, K] -> [T, I]: `silu(gate) * up`, where gate are the first I
    outputs.
    """
    return silu_and_mul(F.linear(x, weight))


@kernel_takes(x="T | K", weight="N K", bias="N", residual="T | N")
def few_row_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies [T, K] x [N, K] -> [T, N], for few rows T, of sizes that need not be even.

    Args:
        residual: [T, N] that the product is added to in place; it is what is returned.
        out_dtype: Without a residual: that of the result; by default that of `x`.
    """
    wide = (x.float(), weight.float(), None if bias is None else bias.float())
    product = F.linear(*wide)
    if residual is not None:
        return residual.copy_(residual.float() + product)
    return product.to(out_dtype or x.dtype)


@kernel_takes(x="T H | K", weight="H K N |")
def head_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies [T, H, K] x [H, K, N] -> [T, H, N], for few rows T."""
    product = torch.bmm(x.transpose(0, 1).float(), weight.float())
    return product.transpose(0, 1).to(x.dtype).contiguous()


@kernel_takes(x="T | K @16", weight="_ K @16")
def fused_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `small_m_gate_up` for many rows."""
    return small_m_gate_up(x, weight)


@kernel_takes(
    x="T | K @16",
    weight="N K @16",
    **_QKV,
)
def fused_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    keep_kv: bool = False,
) -> Tensor:
    """Multiplies [T, K] x [(Hq + 2 Hkv) D, K], and does what `rope_and_cache` does to the heads.

    Args:
        keep_kv: Keys, rotated, and values are in the result, too; else they are anything there, and
            so they are for tokens that are written nowhere.

    Returns:
        [T, Hq + 2 Hkv, D], queries first, rotated.
    """
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = F.linear(x, weight, bias).view(len(x), -1, head_dim)
    parts = [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q, k, v = torch.split(heads, parts, dim=1)
    angles = positions, cos_sin_cache
    rope_and_cache(q, k, v, *angles, kv_cache, slot_mapping, keep_k=keep_kv)
    return heads


@kernel_takes(
    x="T | K",
    weight="N K",
    **_QKV,
)
def small_m_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Does what `fused_qkv` does for the rows of a decode step, and keeps keys and values."""
    given = positions, cos_sin_cache, kv_cache, slot_mapping
    return fused_qkv(x, weight, bias, *given, keep_kv=True)


@kernel_takes(
    x="T | K",
    weight="N K",
    **_QKV,
    norm_weight="K",
)
def few_row_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Does what `fused_qkv` does for few rows T, and keeps keys and values; with a `norm_weight`
    [K], for the norm of the rows `x`."""
    rows = x.float()
    if norm_weight is not None:
        rows = rms_norm(rows, norm_weight.float(), eps)
    wide = weight.float(), None if bias is None else bias.float()
    given = positions, cos_sin_cache, kv_cache, slot_mapping
    return fused_qkv(rows, *wide, *given, keep_kv=True).to(x.dtype)


@kernel_takes(x="T | K", weight="N K", bias="N")
def invariant_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiplies [T, K] x [N, K] -> [T, N]: each row has the same bits whatever the others are, and
    however many. Here by GEMMs that all have the same number of rows.
    """
    num_rows = len(x)
    padded = F.pad(x, (0, 0, 0, -num_rows % _ROWS))
    if out_dtype is not None:
        padded, weight = padded.to(out_dtype), weight.to(out_dtype)
    if len(padded) == _ROWS:
        return F.linear(padded, weight, bias)[:num_rows]
    tiles = [F.linear(tile, weight, bias) for tile in torch.split(padded, _ROWS)]
    return torch.cat(tiles)[:num_rows] if tiles else x.new_empty((0, len(weight)))


@kernel_takes(x="T | H", given="T | H", weight="1 H")
def row_gate(x: Tensor, given: Tensor, weight: Tensor) -> Tensor:
    """Computes `x * sigmoid(given @ weight.T)`: x [T, H], given [T, H], weight [1, H]. A row has
    the same bits whatever the others are. The memory of `x` may be reused."""
    # Not torch's sigmoid, whose bits on CPU depend on how many tokens there are.
    odds = 1.0 + torch.exp(-invariant_gemm(given, weight, None, torch.float32))
    return (x.float() / odds).to(x.dtype)
