"""Attention over latents and over gathered contexts on a CUDA device, against float64."""

from __future__ import annotations

import kernel_checks as check
import pytest
import torch
from gpu_fixtures import halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops

pytestmark = pytest.mark.gpu


@halves
@pytest.mark.parametrize("num_heads", [8, 16, 64, 128])
def test_latent_attention(dtype: torch.dtype, num_heads: int) -> None:
    sizes = num_heads, 512, 64
    check.latent_rope_and_cache(ops.latent_rope_and_cache, sizes, dtype, "cuda")
    for lengths in (
        ([1, 127, 0, 129, 1000], [1] * 5),
        ([1500], [1]),
        ([300, 700, 1500], [1, 129, 1400]),
    ):
        for fixed in (False, True):
            check.latent_attention(
                ops.latent_attention, lengths, sizes, dtype, fixed_order=fixed, device="cuda"
            )


@halves
@pytest.mark.parametrize("num_padded", [5, 60])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_decodes_that_a_recorded_step_hides(
    dtype: torch.dtype, num_heads: int, num_padded: int
) -> None:
    for lengths in (([300], [200]), ([30_000, 70, 400], [1, 1, 90]), ([600] * 9, [1] * 8 + [40])):
        check.hidden_decodes_of_latents(
            ops.latent_attention, lengths, num_padded, (num_heads, 512, 64), dtype=dtype,
            device="cuda",
        )  # fmt: skip


@halves
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("query_len", "num_heads"), [(1, 16), (2, 8), (3, 16), (1, 40)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_latent_decode(
    dtype: torch.dtype, query_len: int, num_heads: int, block_size: int, turned: bool
) -> None:
    """Contexts in parts and whole, tiles within a block and across blocks, drafts."""
    from tandem_kernels.attention.latent_decode import LatentDecodeTuning, latent_decode

    tuning = LatentDecodeTuning(16, 64, 4, 3, 1, turned=True) if turned else None
    for seq_lens in ([1500], [3, 64, 65, 1000, 128, 127] * 40):
        check.latent_decode(
            latent_decode, seq_lens, query_len, (num_heads, 512, 64), dtype,
            block_size=block_size, device="cuda", tuning=tuning,
        )  # fmt: skip


@halves
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("query_len", "num_heads", "block_size"),
    [(1, 128, 64), (1, 16, 64), (1, 16, 16), (2, 64, 16), (3, 16, 128), (3, 40, 8)],
)
def test_latent_decode_by_warps_that_copy(
    dtype: torch.dtype, query_len: int, num_heads: int, block_size: int, rows: int
) -> None:
    """Contexts in parts and whole, none at all, tiles that end in a block, drafts, rows behind."""
    from tandem_kernels.attention.latent_decode import LatentDecodeTuning, latent_decode

    tuning = LatentDecodeTuning(rows, {16: 64, 64: 128}[rows], 8, 1, 1, ahead=True)
    for seq_lens in ([1500], [3, 64, 65, 0, 1000, 128, 127], [3, 64, 65, 5000, 128, 127] * 40):
        check.latent_decode(
            latent_decode, seq_lens, query_len, (num_heads, 512, 64), dtype,
            block_size=block_size, device="cuda", tuning=tuning,
        )  # fmt: skip


@halves
@pytest.mark.parametrize("num_heads", [8, 16, 40])
def test_expansion_of_cached_latents(dtype: torch.dtype, num_heads: int) -> None:
    check.gather_latents(ops.gather_latents, (num_heads, 512, 64), dtype, "cuda")
    check.merge_attention(ops.merge_attention, (700, num_heads, 128), dtype, "cuda")


@halves
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_copies_of_contexts(dtype: torch.dtype, head_dim: int) -> None:
    check.gather_context(ops.gather_context, head_dim, dtype, "cuda")
    check.gather_context(ops.gather_context, head_dim, dtype, "cuda", value_dim=16)


@halves
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(4, 192, 128), (2, 128, 128), (2, 64, 32)])
def test_ragged_attention(dtype: torch.dtype, sizes: tuple[int, int, int], causal: bool) -> None:
    lengths = [40, 1, 129, 600], [1100, 1, 129, 601 if causal else 0]
    check.ragged_attention(
        ops.ragged_attention, lengths, sizes, dtype, causal=causal, device="cuda"
    )
