"""Attention of whole prompts apart from the rest of the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.attention import Attention, AttentionInputs
from engine.layers.attention_backend import AttentionBackend
from engine.layers.cudnn_prompts import CudnnPrompts
from engine.layers.flash_attention import PROMPTS_PACKAGE, FlashPrompts
from engine.layers.rotary import cos_sin_cache
from engine.layers.whole_prompts import WholePrompts
from tandem_kernels.attention_metadata import AttentionMetadata

HEADS, KV_HEADS, MAX_LEN = 8, 2, 4096
LENGTHS = [1024, 1500, 2047]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 128])
def test_cudnn_equals_paged_attention(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    assert CudnnPrompts.is_available(dtype, head_dim, torch.device("cuda"))
    for difference in _differences(CudnnPrompts(), LENGTHS, dtype, head_dim, block_size):
        assert difference < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_flash_attention_equals_paged_attention(head_dim: int) -> None:
    package = FlashPrompts.package(torch.bfloat16, head_dim, torch.device("cuda"))
    if package is None:
        pytest.skip("no package with FlashAttention 3 is installed")
    prompts = FlashPrompts(package)
    for difference in _differences(prompts, LENGTHS, torch.bfloat16, head_dim, 128):
        assert difference < 5e-3


def test_cudnn_way_equals_paged_attention_on_cpu() -> None:
    lengths = [256, 150, 100]
    for difference in _differences(CudnnPrompts(), lengths, torch.float32, 32, 16, "cpu"):
        assert difference < 1e-5


def test_flash_way_equals_paged_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in computes by the meaning of the library's arguments."""
    package = ModuleType(PROMPTS_PACKAGE)
    package.flash_attn_varlen_func = _flash_attn_varlen
    monkeypatch.setitem(sys.modules, PROMPTS_PACKAGE, package)
    lengths = [256, 150, 100]
    prompts = FlashPrompts(PROMPTS_PACKAGE)
    for difference in _differences(prompts, lengths, torch.float32, 32, 16, "cpu"):
        assert difference < 1e-5


def _flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """[T, Hq, D]; what lies outside of the sequences is left as it is."""
    assert causal and cu_seqlens_q.dtype == torch.int32 and q.stride(-1) == k.stride(-1) == 1
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    for start, end in pairwise(cu_seqlens_q.tolist()):
        assert end - start <= max_seqlen_q
        parts = (part[start:end].transpose(0, 1) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(
            *parts, is_causal=True, scale=softmax_scale, enable_gqa=True
        )
        out[start:end] = attended.transpose(0, 1)
    return out


def _differences(
    prompts: WholePrompts,
    lengths: list[int],
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    device: str = "cuda",
) -> Iterator[float]:
    """Of this way from the paged one: three whole prompts alone; with two decodes before them and
    a chunk with a cached beginning behind; and with one of them left to the others."""
    decodes, cached = [(1, 77), (1, 1300)], [(300, 900)]
    whole = [(length, length) for length in lengths]
    for num_decodes, chunks, num_whole in (
        (0, whole, 3),
        (0, whole[:1], 1),
        (2, decodes + whole + cached, 3),
        (2, decodes + whole + cached, 2),
    ):
        batch = _Batch(chunks, num_decodes, dtype, head_dim, block_size, device)
        expected = batch.attended(AttentionBackend(), ())
        backend = AttentionBackend(whole_prompts=prompts)
        found = batch.attended(backend, tuple(lengths[:num_whole]))
        yield ((found - expected).norm() / expected.norm()).item()


class _Batch:
    """(query, context) lengths. The cache around them is full of others' keys."""

    def __init__(
        self,
        chunks: list[tuple[int, int]],
        num_decodes: int,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        device: str,
    ) -> None:
        generator = torch.Generator(device).manual_seed(head_dim + block_size)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        query_lens, seq_lens = (list(lengths) for lengths in zip(*chunks, strict=True))
        max_blocks = MAX_LEN // block_size
        num_blocks = len(chunks) * max_blocks
        blocks = torch.randperm(num_blocks, generator=generator, device=device).int()
        self.positions = torch.cat([torch.arange(n - q, n, device=device) for q, n in chunks])
        self.metadata = AttentionMetadata(
            block_tables=blocks.view(len(chunks), max_blocks),
            query_start_loc=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            num_decodes=num_decodes,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
        request = torch.repeat_interleave(torch.tensor(query_lens, device=device))
        block = self.metadata.block_tables[request, self.positions // block_size].long()
        self.slots = block * block_size + self.positions % block_size
        self.qkv = randn(len(self.positions), (HEADS + 2 * KV_HEADS) * head_dim)
        self.kv_cache = randn(num_blocks, 2, KV_HEADS, block_size, head_dim)
        self.rotary = cos_sin_cache(head_dim, MAX_LEN, 1e4, None).to(device)
        self.layer = Attention(HEADS, KV_HEADS, head_dim)

    def attended(self, backend: AttentionBackend, whole_prompt_lens: tuple[int, ...]) -> Tensor:
        metadata = replace(self.metadata, whole_prompt_lens=whole_prompt_lens)
        inputs = AttentionInputs(self.positions, self.rotary, self.slots, metadata, backend)
        found: Tensor = self.layer(self.qkv.clone(), self.kv_cache.clone(), inputs)
        return found.double()
