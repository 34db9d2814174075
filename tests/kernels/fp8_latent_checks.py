"""Checks of latents in an FP8 cache, with one scale for all of a row."""

from __future__ import annotations

from dataclasses import replace

import fp8_checks
import kernel_checks as check
import kernel_oracle as oracle
import torch

from tandem_kernels.attention.kv_scales import E4M3, KVScales

Sizes = tuple[int, int, int]
"""Sizes are (H, L, R)."""


def _batch(
    lengths: tuple[list[int], list[int]], sizes: Sizes, dtype: torch.dtype, device: str, block: int
) -> tuple[oracle.PagedBatch, KVScales]:
    num_heads, latent, rope = sizes
    plain = oracle.paged_batch(
        *lengths, num_kv_heads=1, group=num_heads, head_dim=latent + rope, block_size=block,
        dtype=dtype, device=device,
    )  # fmt: skip
    batch, scales = fp8_checks.in_fp8(plain)
    batch.values = [keys[:, :, :latent] for keys in batch.keys]
    return batch, KVScales(scales.k, scales.k)


def latent_attention(
    op: check.Op,
    lengths: tuple[list[int], list[int]],
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    fixed_order: bool = False,
    device: str = "cpu",
) -> None:
    batch, scales = _batch(lengths, sizes, dtype, device, 16)
    _, latent, _ = sizes
    q, cache = batch.q, batch.kv_cache[:, 0, 0]
    metadata = replace(batch.metadata, fixed_order=fixed_order)
    out = op(q[:, :, :latent], q[:, :, latent:], cache, metadata, batch.scale, scales)
    assert out.dtype == dtype
    assert oracle.relative_error(out, batch.expected(latent)) < check.ATTENTION[dtype]


def latent_decode(
    op: check.Op,
    seq_lens: list[int],
    query_len: int,
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    device: str = "cpu",
    **options: object,
) -> None:
    lengths = seq_lens, [query_len] * len(seq_lens)
    batch, scales = _batch(lengths, sizes, dtype, device, block_size)
    _, latent, _ = sizes
    metadata = replace(batch.metadata, num_decodes=len(seq_lens), decode_query_len=query_len)
    q, cache = batch.q, batch.kv_cache[:, 0, 0]
    out = torch.empty_like(q[:, :, :latent], memory_format=torch.contiguous_format)
    queries = q[:, :, :latent], q[:, :, latent:]
    op(*queries, cache, metadata, batch.scale, out, kv_scales=scales, **options)
    assert oracle.relative_error(out, batch.expected(latent)) < check.ATTENTION[dtype]


def gather_latents(op: check.Op, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
    num_heads, latent, rope = sizes
    batch, scales = _batch(([70, 33], [1, 1]), (1, latent, rope), dtype, device, 16)
    first = torch.tensor([16, 0], dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 44, 77], dtype=torch.int32, device=device)
    keys = torch.full((77, num_heads, rope), torch.nan, dtype=dtype, device=device)
    tables = batch.metadata.block_tables
    latents = op(batch.kv_cache[:, 0, 0], tables, first, bounds, keys, scales)
    expected = torch.cat((batch.keys[0][0, 16:60], batch.keys[1][0]))
    assert latents.dtype == dtype
    bound = check.ELEMENTWISE[dtype]
    assert oracle.relative_error(latents, expected[:, :latent]) < bound
    heads = expected[:, None, latent:].expand(-1, num_heads, -1)
    assert oracle.relative_error(keys, heads) < bound


def latent_rope_and_cache(
    op: check.Op, sizes: Sizes, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Numbers are the nearest, but where rounding before decides between two neighbours."""
    num_heads, latent, rope = sizes
    num_tokens, block_size = 6, 4
    heads = torch.randn(num_tokens, num_heads, rope, device=device).to(dtype)
    kv = torch.randn(num_tokens, latent + rope, device=device).to(dtype)
    weight = torch.randn(latent, device=device).to(dtype)
    weight[0] = 900.0
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    slots = torch.randperm(5 * block_size, device=device)[:num_tokens]
    slots[2] = -1
    stored = torch.full((5, block_size, latent + rope), 0x7F, dtype=torch.uint8, device=device)
    scale = torch.tensor([0.03], device=device)
    angles = oracle.rope_angles(64, rope)
    turned = oracle.rotate(kv[:, None, latent:], angles.to(device)[positions])[:, 0]
    expected = torch.cat((oracle.rms_norm(kv[:, :latent], weight, 1e-6), turned), dim=-1)
    table, scales = oracle.cos_sin_cache(angles).to(device), KVScales(scale, scale)
    op(heads, kv, weight, positions, table, stored.view(E4M3), slots, 1e-6, scales)
    kept = slots >= 0
    flat = stored.view(-1, latent + rope)
    found = flat[slots[kept]]
    nearest = fp8_checks.nearest_bytes(expected[kept] / 0.03)
    assert ((nearest & 0x7F) == 0x7E).any()
    differs = found != nearest
    assert differs.double().mean() < 0.02
    assert ((found.int() - nearest.int()).abs()[differs] == 1).all()
    assert int((flat == 0x7F).all(-1).sum()) == len(flat) - int(kept.sum())
