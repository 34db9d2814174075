"""The FP8 cache in plain torch, against the list of the format's numbers."""

from __future__ import annotations

import fp8_checks
import fp8_latent_checks as fp8_latents
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.reference.fp8_cache import dequantise, quantise

RARE = [
    {},
    {"window": 40, "page_padding": 64},
    {"softcap": 0.7},
    {"has_sinks": True},
    {"fixed_order": True},
]


def test_every_byte_is_its_number_and_rounds_to_itself() -> None:
    numbers = fp8_checks.e4m3_numbers().float()
    for sign, first in ((1, 0), (-1, 0x80)):
        stored = torch.arange(first, first + 0x7F).to(torch.uint8)
        assert torch.equal(dequantise(stored, torch.ones(1)), sign * numbers)
        assert torch.equal(quantise(sign * numbers, torch.ones(1)).view(torch.uint8), stored)


def test_rounding_to_the_nearest_and_at_the_ends() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4096) * spread for spread in (1e-3, 0.02, 3.0, 300.0)])
    numbers = fp8_checks.e4m3_numbers().float()
    x = torch.cat([x, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([448.1, 1e30, -1e9, 463.9])])
    found = quantise(x, torch.ones(1)).view(torch.uint8)
    assert torch.equal(found, fp8_checks.nearest_bytes(x))
    assert found[-4:].tolist() == [0x7E, 0x7E, 0xFE, 0x7E]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep_k", [False, True])
def test_write_into_the_cache(dtype: torch.dtype, keep_k: bool) -> None:
    torch.manual_seed(1)
    shape = {"head_dim": 24, "num_kv_heads": 3, "num_tokens": 40}
    fp8_checks.rope_and_cache(ops.rope_and_cache, dtype, keep_k=keep_k, **shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", RARE, ids=str)
def test_attention(dtype: torch.dtype, options: dict[str, object]) -> None:
    torch.manual_seed(2)
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 24, "block_size": 16, **options}
    lengths = [5, 70, 33, 0, 64, 20], [1, 1, 1, 1, 7, 20]
    fp8_checks.paged_attention(ops.paged_attention, *lengths, dtype=dtype, **shape)


def test_attention_in_fixed_order() -> None:
    torch.manual_seed(3)
    fp8_checks.attention_in_fixed_order(ops.paged_attention, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    sizes = 3, 24, 8
    fp8_latents.latent_rope_and_cache(ops.latent_rope_and_cache, sizes, dtype)
    fp8_latents.gather_latents(ops.gather_latents, sizes, dtype)
    for fixed_order in (False, True):
        fp8_latents.latent_attention(
            ops.latent_attention,
            ([5, 70, 33, 0, 20], [1, 1, 7, 1, 20]),
            sizes,
            dtype,
            fixed_order=fixed_order,
        )
