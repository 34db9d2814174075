"""Kernels over an FP8 cache on a CUDA device, against float64; what nobody wrote is NaN."""

from __future__ import annotations

import fp8_checks
import fp8_latent_checks as fp8_latents
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.attention.latent_decode import LatentDecodeTuning, latent_decode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_kv_heads", "group"),
    [
        (torch.bfloat16, 128, 8, 4),
        (torch.bfloat16, 80, 2, 7),
        (torch.float16, 256, 1, 16),
    ],
    ids=str,
)
def test_write_into_an_fp8_cache(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    shape = {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "group": group}
    for num_tokens, keep_k in ((1, False), (33, True), (600, False)):
        fp8_checks.rope_and_cache(
            ops.rope_and_cache, dtype, num_tokens=num_tokens, keep_k=keep_k, device="cuda", **shape
        )


def _fp8_attention(seq_lens: list[int], query_lens: list[int], **options: object) -> None:
    op = ops.paged_attention
    fp8_checks.paged_attention(op, seq_lens, query_lens, device="cuda", **options)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_kv_heads", "group"),
    [
        (torch.bfloat16, 128, 8, 4),
        (torch.bfloat16, 64, 8, 1),
        (torch.bfloat16, 256, 1, 16),
        (torch.float16, 80, 2, 7),
        (torch.float32, 16, 2, 2),
    ],
    ids=str,
)
def test_fp8_attention_by_shape(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype}
    _fp8_attention([1, 17, 64, 300, 1000], [1] * 5, block_size=64, **shape)
    _fp8_attention([33, 500, 129, 700, 5], [1, 1, 129, 77, 5], block_size=64, **shape)
    _fp8_attention([40, 2500, 1300], [1, 2400, 1200], block_size=128, **shape)


@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_fp8_attention_by_block_size(block_size: int) -> None:
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "dtype": torch.bfloat16}
    _fp8_attention([1, 255, 256, 257, 2000], [1] * 5, block_size=block_size, **shape)
    _fp8_attention([300, 257, 256, 1500], [1, 257, 200, 333], block_size=block_size, **shape)
    padded = {**shape, "page_padding": 1024, "block_size": block_size}
    _fp8_attention([1, 127, 128, 1000, 700], [1, 1, 1, 1, 129], window=128, **padded)


@pytest.mark.parametrize("num_decodes", [1, 16, 64, 256])
def test_many_decodes_over_an_fp8_cache(num_decodes: int) -> None:
    """Every tuning, with lengths from 0 so that runs begin and end anywhere."""
    lengths = torch.randint(0, 600, (num_decodes,)).tolist()
    shape = {"num_kv_heads": 4, "group": 4, "head_dim": 128, "dtype": torch.bfloat16}
    _fp8_attention(lengths, [1] * num_decodes, block_size=32, **shape)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 0.7}, {"has_sinks": True}, {"has_sinks": True, "window": 300}],
    ids=str,
)
def test_fp8_attention_with_rare_options(options: dict[str, object]) -> None:
    shape = {"num_kv_heads": 2, "group": 4, "head_dim": 128, "dtype": torch.bfloat16}
    lengths = [1, 127, 128, 1000, 2500], [1, 1, 1, 129, 2400]
    _fp8_attention(*lengths, block_size=64, **shape, **options)


def test_fp8_attention_in_fixed_order() -> None:
    fp8_checks.attention_in_fixed_order(ops.paged_attention, torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_heads", [16, 128])
def test_latents_in_an_fp8_cache(num_heads: int) -> None:
    sizes, dtype = (num_heads, 512, 64), torch.bfloat16
    given = {"device": "cuda"}
    fp8_latents.latent_rope_and_cache(ops.latent_rope_and_cache, sizes, dtype, **given)
    fp8_latents.gather_latents(ops.gather_latents, sizes, dtype, **given)
    for lengths in (([1, 127, 0, 129, 1000], [1] * 5), ([300, 700, 1500], [1, 129, 1400])):
        fp8_latents.latent_attention(ops.latent_attention, lengths, sizes, dtype, **given)
    tuning = LatentDecodeTuning(16, 64, 4, 3, turned=True)
    shape = [1500, 3, 64], 1, sizes, dtype
    fp8_latents.latent_decode(latent_decode, *shape, block_size=64, tuning=tuning, **given)
    for query_len, block_size in ((1, 64), (3, 16)):
        shape = [1500, 3, 64, 5000] * 20, query_len, sizes, dtype
        fp8_latents.latent_decode(latent_decode, *shape, block_size=block_size, **given)
