"""Normalisation, activation and rotary embedding in plain torch.

Half precision is computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.attention.kv_pages import KVPages, PagedKV, sizes_of
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.attention.value_form import PLAIN_VALUES, ValueForm
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.reference.fp8_cache import quantise
from tandem_kernels.reference.layouts import KV_SCALES, WRITTEN_KV, kernel_takes
from tandem_kernels.reference.slots import places_of
from tandem_kernels.reference.steady import sigmoid, silu, situ


@kernel_takes(token_ids="T: int", table="V H")
def embedding(token_ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """Returns rows [T, H] of a table.

    Args:
        token_ids: [T] int32 or int64.
        table: [V, H].
        first: The table's first token: it is a part, and tokens that it lacks get zeros; None: it
            has all tokens there are.

    Raises:
        IndexError: There is no such token. A GPU does not look, and gives zeros.
    """
    if first is None:
        return F.embedding(token_ids, table)
    local = token_ids - first
    known = (local >= 0) & (local < len(table))
    rows = F.embedding(torch.where(known, local, 0), table)
    return rows.masked_fill_(~known.unsqueeze(1), 0)


@kernel_takes(x="* | H", weight="H")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [..., H] to unit mean square, then by `weight` [H], which may be more
    exact than `x`."""
    if weight.dtype != x.dtype:
        return torch.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    return torch.rms_norm(x, x.shape[-1:], weight, eps)


@kernel_takes(x="T | H", residual="T | H", weight="H")
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Args:
        x: [T, H], output of the previous sublayer.
        residual: [T, H], the residual stream.
        weight: [H].
        eps: Added to the mean square.

    Returns:
        (normalised sum, sum), both [T, H]. The sum is rounded to the dtype of `x` before it is
        normalised, so the norm sees what the residual stream carries on. Both inputs' memory
        may be reused: the caller must not read them again.
    """
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual


@kernel_takes(x="T | _")
def silu_and_mul(x: Tensor) -> Tensor:
    """Computes the gated activation [T, 2I] -> [T, I], `silu(x[:, :I]) * x[:, I:]`."""
    gate, up = x.chunk(2, dim=-1)
    if x.dtype == torch.float32:
        return F.silu(gate).mul_(up)
    return F.silu(gate.float()).mul_(up).to(x.dtype)


@kernel_takes(x="T | _")
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Computes the gated activation [T, 2I] -> [T, I], `gelu(x[:, :I]) * x[:, I:]`, with GELU by
    its tanh formula."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate.float(), approximate="tanh").mul_(up).to(x.dtype)


@kernel_takes(x="T | _")
def bounded_gate_and_mul(x: Tensor, form: GateForm) -> Tensor:
    """Computes the gated activation [T, 2I] -> [T, I] of a form that has a limit."""
    gate, up = x.float().chunk(2, dim=-1)
    if form.kind == "situ":
        return situ(gate, up, form).to(x.dtype)
    up = up.clamp(-form.limit, form.limit)
    if form.kind == "limited":
        return F.silu(gate).clamp_(max=form.limit).mul_(up).to(x.dtype)
    gate = gate.clamp(max=form.limit)
    if form.kind == "capped":
        return silu(gate).mul_(up).to(x.dtype)
    return (sigmoid(gate * form.alpha).mul_(gate) * (up + 1.0)).to(x.dtype)


@kernel_takes(x="T | H")
def relu_squared(x: Tensor) -> Tensor:
    """Computes max(x, 0) ** 2 of [T, I] (So et al., Primer, 2021). The memory of `x` may be
    reused."""
    return x.float().clamp(min=0.0).square().to(x.dtype)


@kernel_takes(x="T | _", gate="T | _")
def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Computes `x * sigmoid(gate)`: x [T, I], gate [T, I], or [T, H] with a number for each I / H
    neighbours. The memory of `x` may be reused."""
    return _times(x, sigmoid(gate.float()))


@kernel_takes(x="T | _", gate="T | _")
def softplus_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Computes `x * log(1 + exp(gate))`; see `sigmoid_and_mul`."""
    return _times(x, F.softplus(gate.float()))


def _times(x: Tensor, factors: Tensor) -> Tensor:
    """Multiplies [T, I] by [T, I], or by [T, H], in float32."""
    parts = x.view(len(x), factors.shape[1], -1)
    if x.dtype == torch.float32:
        return parts.mul_(factors[..., None]).view(x.shape)
    return (parts.float() * factors[..., None]).to(x.dtype).view(x.shape)


@kernel_takes(
    q="T | _ D",
    k="T | _ D",
    v="T | _ _",
    positions="T: int",
    cos_sin_cache="_ D: float32",
    kv_cache=WRITTEN_KV,
    slot_mapping="T: int",
    q_weight="D",
    k_weight="D",
    kv_scales=KV_SCALES,
)
def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: PagedKV,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    keep_k: bool = False,
    kv_scales: KVScales | None = None,
    values: ValueForm = PLAIN_VALUES,
) -> Tensor:
    """Rotate queries and keys, and write keys and values into the paged cache.

    Args:
        q: [T, Hq, D], changed in place.
        k: [T, Hkv, D]; of a layer that attends to keys of another one no heads: queries alone are
            rotated then.
        v: [T, Hkv, Dv]; Dv is 0 where the cache has keys alone.
        positions: [T] int64.
        cos_sin_cache: [M, D] float32, cosines in the first half, sines in the second.
        kv_cache: [N, 2, Hkv, B, D], or pages where Dv differs from D, written at `slot_mapping`.
        slot_mapping: [T] int64, `block * B + offset`; -1 writes nothing.
        q_weight: [D] or None, RMSNorm of each query head before the rotation.
        k_weight: [D] or None, the same for keys.
        eps: Of those norms, and of values.
        keep_k: Keys that are written to the cache are also changed in place, and so are values.
        kv_scales: The cache has e4m3 numbers of these scales; None: it has those of `k` and `v`.
        values: What is done to values.

    Returns:
        `q`, rotated.
    """
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    parts = _widened(q, q_weight, eps), _widened(k, k_weight, eps)
    rotated_q, rotated_k = _rotate(torch.cat(parts, dim=1), cos, sin).split_with_sizes(
        [q.shape[1], k.shape[1]], dim=1
    )
    q.copy_(rotated_q)
    if k.shape[1] == 0:
        return q
    formed_v = v if values.is_plain else _formed(v, values, eps)
    if keep_k:
        written = slot_mapping[:, None, None] >= 0
        k.copy_(torch.where(written, rotated_k.to(k.dtype), k))
        v.copy_(torch.where(written, formed_v.to(v.dtype), v))
    if kv_scales is None:
        dtype = kv_cache.dtype
        _write_slots(kv_cache, slot_mapping, rotated_k.to(dtype), formed_v.to(dtype))
    else:
        pairs = (rotated_k, kv_scales.k), (formed_v, kv_scales.v)
        rows = [quantise(x, scale[:, None]).view(torch.uint8) for x, scale in pairs]
        _write_slots(kv_cache.view(torch.uint8), slot_mapping, *rows)
    return q


def _widened(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns heads [T, H, D] in float32, normalised where there is a weight."""
    wide = x.float()
    return wide if weight is None else rms_norm(wide, weight.float(), eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head of `x` [T, H, D], float32."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _formed(v: Tensor, values: ValueForm, eps: float) -> Tensor:
    """Returns values as they are kept, in float32."""
    wide = v.float()
    if values.normed:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * values.scale


def _write_slots(kv_cache: PagedKV, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    places = places_of(slot_mapping, sizes_of(kv_cache).block_size)
    k, v = places.of(k), places.of(v)
    if isinstance(kv_cache, KVPages):
        kv_cache.k.transpose(1, 2).index_put_(places.at, k)  # [N, B, Hkv, D]
        kv_cache.v.transpose(1, 2).index_put_(places.at, v)
    else:
        kv_cache.permute(0, 3, 1, 2, 4).index_put_(places.at, torch.stack((k, v), dim=1))
