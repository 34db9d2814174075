"""Latent attention in plain torch, absorbed and expanded, against float64."""

from __future__ import annotations

import kernel_checks as check
import pytest
import torch

from tandem_kernels import ops

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dtypes
def test_write_into_the_cache(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    check.latent_rope_and_cache(ops.latent_rope_and_cache, (3, 24, 8), dtype)


@dtypes
@pytest.mark.parametrize("fixed_order", [False, True])
def test_attention(dtype: torch.dtype, fixed_order: bool) -> None:
    torch.manual_seed(6)
    lengths = [5, 70, 0, 33, 20], [1, 1, 1, 7, 20]
    check.latent_attention(
        ops.latent_attention, lengths, (4, 24, 8), dtype, fixed_order=fixed_order
    )


@dtypes
def test_expansion_of_cached_latents(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    check.gather_latents(ops.gather_latents, (3, 24, 8), dtype)
    check.merge_attention(ops.merge_attention, (5, 3, 24), dtype)


@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_attention(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(8)
    lengths = [40, 3, 20], [100, 3, 33 if causal else 0]
    check.ragged_attention(ops.ragged_attention, lengths, (3, 24, 12), dtype, causal=causal)
