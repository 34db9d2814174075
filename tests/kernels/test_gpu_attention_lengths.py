"""Attention on a CUDA device, against float64: lengths, and where blocks lie."""

from __future__ import annotations

from dataclasses import replace

import kernel_checks as check
import kernel_oracle as oracle
import pytest
import torch
from gpu_fixtures import check_attention, halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata

pytestmark = pytest.mark.gpu


@halves
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_attention_by_block_size(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": head_dim, "dtype": dtype}
    check_attention([1, 255, 256, 257, 2000], [1] * 5, block_size=block_size, **shape)
    check_attention([300, 257, 256, 1500], [1, 257, 200, 333], block_size=block_size, **shape)


@halves
@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 127, 1023, 4097, 32768])
def test_attention_by_length(dtype: torch.dtype, seq_len: int) -> None:
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "dtype": dtype}
    check_attention([seq_len], [1], block_size=64, **shape)
    check_attention([seq_len] * 3, [1] * 3, block_size=64, **shape)
    check_attention([seq_len], [min(seq_len, 2048)], block_size=64, **shape)
    check_attention([seq_len] * 2, [min(seq_len, 3000)] * 2, block_size=128, **shape)
    if seq_len > 1:
        check_attention([seq_len], [2], block_size=64, **shape)


@pytest.mark.parametrize("num_decodes", [1, 16, 64, 130, 256, 1000])
def test_many_decodes_with_padding(num_decodes: int) -> None:
    """Lengths from 0 to 4000, so that runs begin and end anywhere."""
    lengths = torch.randint(0, 4000 if num_decodes <= 64 else 600, (num_decodes,)).tolist()
    shape = {"num_kv_heads": 4, "group": 4, "head_dim": 64, "dtype": torch.bfloat16}
    check_attention(lengths, [1] * num_decodes, block_size=32, **shape)


@halves
@pytest.mark.parametrize("seq_len", [40, 5000, 70_000])
@pytest.mark.parametrize("chunk", [40, 220, 900])
def test_decodes_that_a_recorded_step_hides(dtype: torch.dtype, seq_len: int, chunk: int) -> None:
    """Beside a chunk behind 300 tokens; none decodes, a few, and more than a tile of queries."""
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "block_size": 64, "device": "cuda"}
    for decodes in ([], [seq_len, 77], [seq_len] + [20 + 30 * i for i in range(40)]):
        queries = [1] * len(decodes) + [chunk]
        padded = 64 - len(queries)
        lengths = [*decodes, chunk + 300], queries, padded
        check.hidden_decodes(ops.paged_attention, *lengths, dtype=dtype, **shape)


def test_blocks_beyond_32_bit_offsets() -> None:
    """Element offsets inside the cache exceed 2^31."""
    block_elements = 2 * 8 * 64 * 128
    num_blocks = 2**31 // block_elements + 40
    kv_cache = torch.full(
        (num_blocks, 2, 8, 64, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    blocks = torch.arange(num_blocks - 8, num_blocks, dtype=torch.int32, device="cuda")
    kv_cache[blocks.long()] = torch.randn(8, 2, 8, 64, 128, device="cuda").bfloat16()
    pages = kv_cache[blocks.long()].permute(1, 2, 0, 3, 4).reshape(2, 8, 512, 128)
    batch = oracle.PagedBatch(
        torch.randn(1 + 100, 32, 128, device="cuda").bfloat16(),
        kv_cache,
        AttentionMetadata(
            blocks.expand(2, -1).contiguous(),
            oracle.cumulative([1, 100]).cuda(),
            torch.tensor([500, 512], dtype=torch.int32, device="cuda"),
            num_decodes=1,
            max_query_len=100,
            max_seq_len=512,
        ),
        [pages[0, :, :500], pages[0]],
        [pages[1, :, :500], pages[1]],
        128**-0.5,
    )
    check.paged_attention(ops.paged_attention, batch)


def test_layers_of_one_allocation() -> None:
    """A layer's cache may be a strided view: [N, L, 2, H, B, D] with the layers inside."""
    whole = torch.full((12, 3, 2, 2, 16, 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    batch = oracle.paged_batch(
        [40, 70],
        [1, 30],
        num_kv_heads=2,
        group=4,
        head_dim=64,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    view = whole[:, 1]
    view[: batch.kv_cache.shape[0]] = batch.kv_cache
    batch.kv_cache = view
    check.paged_attention(ops.paged_attention, batch)


def test_a_captured_decode_equals_the_eager_one_bit_for_bit() -> None:
    """Lengths change between replays; the grid and all addresses stay."""
    batch = oracle.paged_batch(
        [900, 1700, 30, 1],
        [1] * 4,
        num_kv_heads=8,
        group=4,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
    for lengths in ([900, 1700, 30, 1], [1, 1000, 0, 1], [64, 128, 17, 0]):
        batch.metadata.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        eager = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
        assert torch.equal(out, eager)


@halves
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 4), (128, 1), (256, 2)])
def test_contexts_in_parts(dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    """Few queries behind long contexts, short ones among them."""
    shape = {"num_kv_heads": 4, "group": group, "head_dim": head_dim, "dtype": dtype}
    check_attention([8256], [64], block_size=block_size, **shape)
    check_attention([40_000], [17], block_size=block_size, **shape)
    check_attention([9000, 300, 1024, 5000], [30, 30, 2, 3], block_size=block_size, **shape)


def test_recorded_parts_fit_any_length() -> None:
    """A graph is replayed for other lengths, twice each: counts of arrivals are zero again."""
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "block_size": 64}
    batches = [
        oracle.paged_batch([length], [64], dtype=torch.bfloat16, device="cuda", **shape)  # type: ignore[arg-type]
        for length in (8256, 64, 700, 3000)
    ]
    longest = batches[0]
    tables = longest.metadata.block_tables.clone()
    metadata = replace(longest.metadata, block_tables=tables)
    q, kv_cache = longest.q.clone(), longest.kv_cache.clone()
    ops.paged_attention(q, kv_cache, metadata, longest.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(q, kv_cache, metadata, longest.scale)
    for batch in batches:
        used = batch.metadata.block_tables
        q.copy_(batch.q)
        kv_cache[: len(batch.kv_cache)] = batch.kv_cache
        tables[:, : used.shape[1]] = used
        metadata.seq_lens.copy_(batch.metadata.seq_lens)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
        assert oracle.relative_error(out, batch.expected()) < check.ATTENTION[out.dtype]
