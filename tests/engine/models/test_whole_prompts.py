"""Attention of whole prompts apart from the rest of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.layers import dense_attention
from engine.layers.attention import Attention, AttentionInputs
from engine.layers.rotary import cos_sin_cache
from tandem_kernels.attention_metadata import AttentionMetadata

HEADS, KV_HEADS, MAX_LEN = 8, 2, 4096


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 128])
def test_whole_prompts_equal_paged_attention(
    dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    device = torch.device("cuda")
    assert dense_attention.is_available(dtype, head_dim, device)
    for difference in _differences([1, 1, 300, 1024, 1500, 2047], dtype, head_dim, block_size):
        assert difference < 5e-3


def test_whole_prompts_equal_paged_attention_on_cpu() -> None:
    for difference in _differences([1, 1, 30, 256, 150, 100], torch.float32, 32, 16, "cpu"):
        assert difference < 1e-5


def _differences(
    query_lens: list[int], dtype: torch.dtype, head_dim: int, block_size: int, device: str = "cuda"
) -> Iterator[float]:
    """Of every way from the paged one. Two decodes, a chunk behind a cached beginning, and whole
    prompts of padded and unpadded lengths; the cache around them is full of others' keys."""
    seq_lens = [77, 1300, 900, *query_lens[3:]]
    generator = torch.Generator(device).manual_seed(head_dim + block_size)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    max_blocks = MAX_LEN // block_size
    num_blocks = len(seq_lens) * max_blocks
    blocks = torch.randperm(num_blocks, generator=generator, device=device).int()
    block_tables = blocks.view(len(seq_lens), max_blocks)
    bounds = torch.tensor([0, *query_lens], device=device).cumsum(0)
    positions = torch.cat(
        [torch.arange(n - q, n, device=device) for q, n in zip(query_lens, seq_lens, strict=True)]
    )
    request = torch.repeat_interleave(torch.tensor(query_lens, device=device))
    slots = block_tables[request, positions // block_size].long() * block_size
    slots += positions % block_size
    qkv = randn(len(positions), (HEADS + 2 * KV_HEADS) * head_dim)
    kv_cache = randn(num_blocks, 2, KV_HEADS, block_size, head_dim)
    layer = Attention(HEADS, KV_HEADS, head_dim)
    expected: torch.Tensor | None = None
    last = tuple(query_lens[3:])
    for whole_prompt_lens in ((), last, last[2:]):
        metadata = AttentionMetadata(
            block_tables=block_tables,
            query_start_loc=bounds.int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            num_decodes=2,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            whole_prompt_lens=whole_prompt_lens,
        )
        rotary = cos_sin_cache(head_dim, MAX_LEN, 1e4, None).to(device)
        inputs = AttentionInputs(positions, rotary, slots, metadata)
        attended = layer(qkv.clone(), kv_cache.clone(), inputs).double()
        if expected is None:
            expected = attended
        yield ((attended - expected).norm() / expected.norm()).item()
