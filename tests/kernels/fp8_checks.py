"""Checks of an FP8 cache, for any column of the dispatch table and any device.

The oracle knows the format as the list of its numbers, and rounds by looking for the nearest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_checks as check
import kernel_oracle as oracle
import torch
from torch import Tensor

from tandem_kernels.attention.kv_pages import KVPages, PagedKV, apart, first_of, sizes_of
from tandem_kernels.attention.kv_scales import E4M3, KVScales


def e4m3_numbers() -> Tensor:
    """Returns the numbers of bytes 0 to 0x7E in float64: 2^-9 apart at first, then eight for each
    power of two, up to 448."""
    small = [m * 2.0**-9 for m in range(8)]
    others = [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor([*small, *others[:-1]], dtype=torch.float64)


def nearest_bytes(x: Tensor) -> Tensor:
    """Returns the bytes of the e4m3 numbers nearest to `x`, of two the even one."""
    numbers = e4m3_numbers().to(x.device)
    wide = x.double().abs().clamp(max=448.0)
    above = torch.searchsorted(numbers, wide).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    down, up = wide - numbers[below], numbers[above] - wide
    takes_above = (up < down) | ((up == down) & (above % 2 == 0))
    byte = torch.where(takes_above, above, below) | (torch.signbit(x).long() << 7)
    return byte.to(torch.uint8)


def scales_of(num_kv_heads: int, device: str) -> KVScales:
    """Returns a scale for each head, all different."""
    return KVScales(
        torch.linspace(0.011, 0.37, num_kv_heads, device=device),
        torch.linspace(0.9, 0.004, num_kv_heads, device=device),
    )


def in_fp8(batch: oracle.PagedBatch) -> tuple[oracle.PagedBatch, KVScales]:
    """Returns the batch over an FP8 cache; its keys and values are what the cache has."""
    cache = batch.kv_cache
    scales = scales_of(sizes_of(cache).num_kv_heads, str(cache.device))
    both = torch.stack((scales.k, scales.v)).double()
    memory = first_of(cache).untyped_storage()
    numbers = memory.nbytes() // cache.dtype.itemsize
    pages = torch.full((numbers,), 0x7F, dtype=torch.uint8, device=cache.device).view(E4M3)
    planes = []
    for plane, scale in zip((apart(cache).k, apart(cache).v), both, strict=True):
        stored = pages.as_strided(plane.shape, plane.stride(), plane.storage_offset())
        of_page = nearest_bytes(plane.double() / scale[:, None, None])
        stored.view(torch.uint8).copy_(torch.where(plane.isnan(), 0x7F, of_page))
        planes.append(stored)
    quantised: PagedKV = KVPages(*planes)
    if isinstance(cache, Tensor):
        quantised = pages.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    kept = []
    for tensors, scale in ((batch.keys, both[0]), (batch.values, both[1])):
        kept.append([_kept(x, scale[:, None, None]) for x in tensors])
    return replace(batch, kv_cache=quantised, keys=kept[0], values=kept[1]), scales


def _kept(x: Tensor, scale: Tensor) -> Tensor:
    byte = nearest_bytes(x.double() / scale)
    size = e4m3_numbers().to(x.device)[(byte & 0x7F).long()]
    return torch.where(byte >= 128, -size, size) * scale


def paged_attention(
    op: check.Op,
    seq_lens: list[int],
    query_lens: list[int],
    *,
    device: str = "cpu",
    fixed_order: bool = False,
    softcap: float = 0.0,
    has_sinks: bool = False,
    **shape: Any,
) -> None:
    batch, scales = in_fp8(oracle.paged_batch(seq_lens, query_lens, device=device, **shape))
    batch.softcap = softcap
    if has_sinks:
        batch.sinks = torch.linspace(-3, 6, batch.q.shape[1], device=device)
    metadata = replace(batch.metadata, fixed_order=fixed_order)
    out = op(batch.q, batch.kv_cache, metadata, batch.scale, softcap, batch.sinks, scales)
    assert out.dtype == batch.q.dtype
    assert oracle.relative_error(out, batch.expected()) < check.ATTENTION[out.dtype]


def attention_in_fixed_order(op: check.Op, dtype: torch.dtype, device: str = "cpu") -> None:
    """A query has the same bits alone and with others, whole and in pieces."""

    def with_scales(q: Tensor, kv_cache: Tensor, metadata: Any, scale: float) -> Any:
        return op(q, stored[kv_cache.data_ptr()], metadata, scale, 0.0, None, scales)

    lengths, shape = [70, 300, 1, 33], {"num_kv_heads": 2, "group": 4, "head_dim": 64}
    plain = oracle.paged_batch(lengths, lengths, block_size=16, dtype=dtype, device=device, **shape)
    batch, scales = in_fp8(plain)
    stored = {plain.kv_cache.data_ptr(): batch.kv_cache}
    check.same_bits_in_pieces(with_scales, plain, lengths, batch.expected(), device)


def rope_and_cache(
    op: check.Op,
    dtype: torch.dtype,
    *,
    head_dim: int,
    num_kv_heads: int,
    group: int = 2,
    num_tokens: int = 6,
    keep_k: bool = False,
    device: str = "cpu",
) -> None:
    """Values have the nearest numbers exactly; so have keys, but where rounding of the rotation
    decides between two neighbours. Some numbers are beyond the format's range."""
    block_size, num_q_heads = 16, num_kv_heads * group
    num_blocks = -(-2 * num_tokens // block_size)
    scales = scales_of(num_kv_heads, device)
    projection = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, device=device)
    projection[:, :, ::7] *= 500.0
    projection[:, :, 1::7] *= 1e-3
    projection[:, :, 3] = 2000.0
    q, k, v = projection.to(dtype).split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    if num_tokens > 1:
        slots[num_tokens // 2] = -1
    written = slots >= 0
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    cache = torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
    angles = oracle.rope_angles(64, head_dim)
    turned = oracle.rotate(k, angles.to(device)[positions])
    table = oracle.cos_sin_cache(angles).to(device)
    before = k.clone()
    op(q, k, v, positions, table, cache.view(E4M3), slots, None, None, 0.0, keep_k, scales)

    by_slot = cache.permute(0, 3, 1, 2, 4).reshape(-1, 2, num_kv_heads, head_dim)
    cached = by_slot[slots[written]]
    values = nearest_bytes(v.float() / scales.v[:, None])[written]
    assert torch.equal(cached[:, 1], values)
    assert ((values & 0x7F) == 0x7E).any()
    keys = nearest_bytes(turned / scales.k[:, None].double())[written]
    differs = cached[:, 0] != keys
    assert differs.double().mean() < 2e-3
    assert ((cached[:, 0].int() - keys.int()).abs()[differs] == 1).all()
    others = torch.ones(by_slot.shape[0], dtype=torch.bool, device=device)
    others[slots[written]] = False
    assert (by_slot[others] == 0x7F).all()
    expected = turned if keep_k else before
    assert oracle.relative_error(k[written], expected[written]) < check.ELEMENTWISE[dtype]
