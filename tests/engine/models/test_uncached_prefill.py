"""Uncached prefill apart from the rest of the batch: what is computed, how chunks are ordered, and
which steps a graph may hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.batch.input_batch import BatchOrder
from engine.layers.attention.backend import AttentionBackend, AttentionSpec, PrefillChunk
from engine.layers.attention.layer import Attention, AttentionInputs
from engine.layers.attention.paged import PagedBackend
from engine.layers.attention.whole_prompts import flash_attention
from engine.layers.attention.whole_prompts.cudnn_prefill import CudnnPrefill
from engine.layers.attention.whole_prompts.flash_attention import PREFILL_PACKAGE, FlashPrefill
from engine.layers.attention.whole_prompts.uncached_prefill import (
    DensePrefill,
    UncachedPrefillBackend,
    UncachedPrefillMetadata,
)
from engine.layers.rotary import cos_sin_cache
from engine.models.recorded_steps import PROMPT_TOKENS
from engine.rope import Rotary
from tandem_kernels import ops
from tandem_kernels.attention.attention_thresholds import whole_prompts
from tandem_kernels.attention.kv_scales import E4M3, KVScales

HEADS, KV_HEADS, MAX_LEN = 8, 2, 4096
SHORTEST = whole_prompts(torch.device("cpu"))
FLASH_TOKENS, CUDNN_TOKENS = SHORTEST.flash_tokens, SHORTEST.cudnn_tokens
CUDNN = CudnnPrefill(CUDNN_TOKENS)
LENGTHS = [1024, 1500, 2047]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 128])
def test_cudnn_equals_paged_attention(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    assert CudnnPrefill.is_available(dtype, head_dim, torch.device("cuda"))
    for difference in _differences(
        CudnnPrefill(CUDNN_TOKENS), LENGTHS, dtype, head_dim, block_size
    ):
        assert difference < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_flash_attention_equals_paged_attention(head_dim: int) -> None:
    package = FlashPrefill.package(torch.bfloat16, head_dim, torch.device("cuda"))
    if package is None:
        pytest.skip("no package with FlashAttention 3 is installed")
    dense = FlashPrefill(package, FLASH_TOKENS)
    for sinks in (None, torch.linspace(-2, 5, HEADS, device="cuda")):
        found = _differences(dense, LENGTHS, torch.bfloat16, head_dim, 128, sinks=sinks)
        for difference in found:
            assert difference < 5e-3


def test_cudnn_way_equals_paged_attention_on_cpu() -> None:
    lengths = [256, 150, 100]
    for difference in _differences(
        CudnnPrefill(CUDNN_TOKENS), lengths, torch.float32, 32, 16, "cpu"
    ):
        assert difference < 1e-5


def test_flash_way_equals_paged_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in computes by the meaning of the library's arguments."""
    monkeypatch.setattr(flash_attention, "forward_kernel", lambda package: _forward_kernel)
    lengths = [256, 150, 100]
    dense = FlashPrefill(PREFILL_PACKAGE, FLASH_TOKENS)
    for sinks in (None, torch.linspace(-2, 5, HEADS)):
        for difference in _differences(dense, lengths, torch.float32, 32, 16, "cpu", sinks):
            assert difference < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("block_size", [16, 128])
def test_copied_contexts_equal_paged_attention(
    head_dim: int, kv_dtype: torch.dtype | None, block_size: int
) -> None:
    package = FlashPrefill.package(torch.bfloat16, head_dim, torch.device("cuda"))
    if package is None:
        pytest.skip("no package with FlashAttention 3 is installed")
    shape = torch.bfloat16, head_dim, block_size, "cuda"
    for difference in _of_chunks(FlashPrefill(package, FLASH_TOKENS), 1024, 1700, shape, kv_dtype):
        assert difference < 8e-3


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_copied_contexts_equal_paged_attention_on_cpu(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype | None
) -> None:
    """One pass over all contexts, and several that are joined."""
    monkeypatch.setattr(flash_attention, "forward_kernel", lambda package: _forward_kernel)
    dense = FlashPrefill(PREFILL_PACKAGE, FLASH_TOKENS)
    for pass_tokens in (1 << 20, 400):
        shape = torch.float32, 32, 16, "cpu"
        for difference in _of_chunks(dense, 100, pass_tokens, shape, kv_dtype):
            assert difference < 1e-5


def _of_chunks(
    dense: DensePrefill,
    shortest: int,
    pass_tokens: int,
    shape: tuple[torch.dtype, int, int, str],
    kv_dtype: torch.dtype | None,
) -> Iterator[float]:
    """Returns how far the two ways are apart: of two long chunks behind cached tokens alone; of one
    between decodes, an uncached prompt and a short chunk; of one with sinks. An uncached prompt
    sees its keys as they were before they came into an FP8 cache, so there it has none beside it.
    """
    dense.min_tokens = shortest
    backend = UncachedPrefillBackend(dense, pass_tokens=pass_tokens)
    assert backend.expands_contexts and not UncachedPrefillBackend(CUDNN).expands_contexts
    chunks = [(shortest, 3 * shortest + 7), (shortest + 3, 2 * shortest)]
    short, decodes = (9, 2 * shortest), [(1, 77), (1, 130)]
    prompts = [] if kv_dtype is not None else [(shortest, shortest)]
    sinks = torch.linspace(-2, 5, HEADS, device=shape[-1])
    for num_decodes, parts, apart, more in (
        (0, chunks, chunks, {}),
        (2, [*decodes, *prompts, chunks[0], short], chunks[:1], {}),
        (0, [chunks[1], short], chunks[1:], {"sinks": sinks}),
    ):
        batch = _Batch(parts, num_decodes, *shape, **more, kv_dtype=kv_dtype)
        metadata = backend.metadata(batch)
        assert isinstance(metadata, UncachedPrefillMetadata)
        assert metadata.chunk_lens == tuple(length for length, _ in apart)
        assert backend.reads_new_keys(metadata) == bool(num_decodes and prompts)
        assert not backend.graph_ok(batch.order)
        expected, found = batch.attended(PagedBackend()), batch.attended(backend)
        yield ((found - expected).norm() / expected.norm()).item()


def test_layers_with_a_window_are_paged() -> None:
    batch = _Batch([(1, 9), (300, 300)], 1, torch.float32, 16, 16, "cpu")
    backend = UncachedPrefillBackend(CudnnPrefill(min_tokens=100))
    assert backend.reads_new_keys(backend.metadata(batch))
    batch.window = 32
    metadata = backend.metadata(batch)
    assert metadata.window == 32 and not backend.reads_new_keys(metadata)
    assert torch.equal(batch.attended(backend), batch.attended(PagedBackend()))


def _forward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attends [T, Hq, D], and gives the log of the softmax's sums [Hq, T]; what lies outside of the
    sequences is left as it is."""
    assert num_splits == 1 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    log_sums = torch.full((q.shape[1], len(q)), torch.nan)
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (start, end), (first, last) in bounds:
        assert end - start <= max_seqlen_q and last - first <= max_seqlen_k
        keys, values = (
            part[first:last].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * softmax_scale
        if is_causal:
            unseen = torch.ones(scores.shape[1:]).triu(1 + last - first - (end - start)).bool()
            scores.masked_fill_(unseen, -torch.inf)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        log_sums[:, start:end] = scores.logsumexp(-1)
    return out, log_sums, out[:0], log_sums[:0]


def _differences(
    dense: DensePrefill,
    lengths: list[int],
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    device: str = "cuda",
    sinks: Tensor | None = None,
) -> Iterator[float]:
    """Returns how far this way is from the paged one: three uncached prompts alone; one alone; with
    two decodes before them and a chunk with a cached beginning behind, also with two drafts each;
    and with one of them, behind a short one, left to the others.
    """
    decodes, cached, short = [(1, 77), (1, 1300)], [(300, 900)], [(5, 5)]
    whole = [(length, length) for length in lengths]
    dense.min_tokens = min(lengths)
    backend = UncachedPrefillBackend(dense)
    for num_decodes, chunks, apart in (
        (0, whole, lengths),
        (0, whole[:1], lengths[:1]),
        (2, decodes + whole + cached, lengths),
        (2, [(3, length) for _, length in decodes] + whole + cached, lengths),
        (2, decodes + whole[:2] + short + whole[2:] + cached, lengths[:2]),
    ):
        batch = _Batch(chunks, num_decodes, dtype, head_dim, block_size, device, sinks)
        metadata = backend.metadata(batch)
        assert isinstance(metadata, UncachedPrefillMetadata)
        assert metadata.prompt_lens == tuple(apart) and not backend.graph_ok(batch.order)
        assert (metadata.window, metadata.fixed_order) == (None, False)
        expected, found = batch.attended(PagedBackend()), batch.attended(backend)
        yield ((found - expected).norm() / expected.norm()).item()


class _Batch:
    """A batch of (query, context) lengths. The cache around them is full of others' keys."""

    window: int | None = None

    def __init__(
        self,
        chunks: list[tuple[int, int]],
        num_decodes: int,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        device: str,
        sinks: Tensor | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator(device).manual_seed(head_dim + block_size)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        query_lens, seq_lens = (list(lengths) for lengths in zip(*chunks, strict=True))
        max_blocks = MAX_LEN // block_size
        num_blocks = len(chunks) * max_blocks
        blocks = torch.randperm(num_blocks, generator=generator, device=device).int()
        self.positions = torch.cat([torch.arange(n - q, n, device=device) for q, n in chunks])
        self.order = BatchOrder(
            rows=np.arange(len(chunks), dtype=np.int32),
            query_lens=np.array(query_lens, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
            num_decodes=num_decodes,
            num_sampled=len(chunks),
            decode_query_len=query_lens[0] if num_decodes else 1,
        )
        self.block_tables = blocks.view(len(chunks), max_blocks)
        self.query_start_loc = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        request = torch.repeat_interleave(torch.tensor(query_lens, device=device))
        block = self.block_tables[request, self.positions // block_size].long()
        self.slots = block * block_size + self.positions % block_size
        self.qkv = randn(len(self.positions), (HEADS + 2 * KV_HEADS) * head_dim)
        self.kv_cache = randn(num_blocks, 2, KV_HEADS, block_size, head_dim)
        kv_scales = None
        if kv_dtype is not None:
            self.kv_cache = self.kv_cache.to(kv_dtype)
            scales = torch.linspace(0.5, 2, KV_HEADS, device=device)
            kv_scales = KVScales(scales, scales.flip(0))
        self.rotary = cos_sin_cache(head_dim, MAX_LEN, Rotary(theta=1e4, dim=head_dim)).to(device)
        spec = AttentionSpec(HEADS, KV_HEADS, head_dim, head_dim**-0.5, 0.0, sinks, kv_scales)
        self.layer = Attention(spec)

    def attended(self, backend: AttentionBackend) -> Tensor:
        metadata = backend.metadata(self)
        inputs = AttentionInputs(self.positions, self.rotary, self.slots, metadata, backend)
        cache = self.kv_cache.clone()
        heads = self.layer.write(self.qkv.clone(), cache, inputs)
        found: Tensor = self.layer(heads, cache, inputs)
        return found.double()


chunk_lists = st.lists(
    st.builds(PrefillChunk, st.integers(0, 9), st.integers(2, 300), st.sampled_from([0, 0, 7]))
)


@pytest.mark.parametrize("copies", [False, True])
@given(ending=chunk_lists, leaving=chunk_lists, num_decodes=st.integers(0, 2))
def test_long_prompts_lie_together_behind_the_decodes(
    copies: bool, ending: list[PrefillChunk], leaving: list[PrefillChunk], num_decodes: int
) -> None:
    dense = CudnnPrefill(min_tokens=100)
    dense.ragged = ops.ragged_attention if copies else None
    backend = UncachedPrefillBackend(dense)
    last = 1 if copies else 0
    ordered = [backend.order(chunks) for chunks in (ending, leaving)]
    for before, after in zip((ending, leaving), ordered, strict=True):
        assert sorted(before) == sorted(after)
        for place in (0, 1, 2):
            kept = [[c for c in part if _place(c, last) == place] for part in (before, after)]
            assert kept[0] == kept[1], "chunks of a kind stay in order"
    chunks = ordered[0] + ordered[1]
    query_lens = [1] * num_decodes + [chunk.num_tokens for chunk in chunks]
    cached = [9] * num_decodes + [chunk.num_computed for chunk in chunks]
    order = BatchOrder(
        rows=np.zeros(len(query_lens), np.int32),
        query_lens=np.array(query_lens, np.int32),
        seq_lens=np.array(query_lens, np.int32) + np.array(cached, np.int32),
        num_decodes=num_decodes,
        num_sampled=num_decodes + len(ending),
    )
    found = [list(part) for part in backend._apart(order)]
    expected: list[list[PrefillChunk]] = [[], []]
    for place, group in itertools.groupby(chunks, lambda chunk: _place(chunk, last)):
        if place == 2 or expected[1] or (place == 0 and expected[0]):
            break
        expected[place] = [chunk._replace(row=-1) for chunk in group]
    assert found == expected
    assert len(found[0]) + len(found[1]) >= sum(_place(chunk, last) < 2 for chunk in ending)
    assert backend.graph_ok(order) == (found == [[], []])


def _place(chunk: PrefillChunk, last: int) -> int:
    place = 0 if chunk.num_computed == 0 else 1
    return place if chunk.num_tokens >= 100 and place <= last else 2


def test_steps_that_may_be_recorded_are_paged() -> None:
    for query_lens, is_paged in (([1500], True), ([1500, 500], True), ([1500, 501], False)):
        lengths = np.array(query_lens, np.int32)
        order = BatchOrder(lengths, lengths, lengths, 0, len(lengths))
        backend = UncachedPrefillBackend(CudnnPrefill(min_tokens=1000), recorded_tokens=2000)
        assert (not any(backend._apart(order))) == is_paged
        assert backend.graph_ok(order) == is_paged


def test_no_graph_is_long_enough_for_uncached_prefill() -> None:
    """So a graph is recorded with paged attention, whatever its padding looks like."""
    assert PROMPT_TOKENS[-1] < min(FLASH_TOKENS, CUDNN_TOKENS)
