"""Which chunks are expanded, in which order they lie, and how contexts are cut into passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch.input_batch import BatchOrder
from engine.config import DeviceConfig
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.attention.backend import PrefillChunk
from engine.layers.attention.context_passes import PASS_TOKENS, context_ranges
from engine.layers.attention.latent_backend import LatentBackend
from engine.layers.attention.selection import choose_attention
from engine.layers.attention.whole_prompts import flash_attention
from engine.layers.attention.whole_prompts.flash_attention import FlashRagged
from engine.models.recorded_steps import PROMPT_TOKENS
from engine.models.specs.latent import LatentSpec
from engine.worker.dummy_steps import largest_steps
from tests.engine.worker.conftest import tiny_config

DEEPSEEK = LatentSpec(q_rank=0, kv_rank=512, nope=128, rope=64, value=128, scale=0.1)
BACKEND = LatentBackend(shape=DEEPSEEK)
chunk_lists = st.lists(
    st.builds(
        PrefillChunk, st.integers(0, 9), st.integers(2, 400), st.sampled_from([0, 0, 7, 900])
    ),
    max_size=6,
)


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "expands"),
    [
        (64, 0, True),
        (63, 0, False),
        (100, 40, True),
        (100, 100, False),
        (170, 100_000, False),
        (171, 100_000, True),
        (2048, 30_000, True),
    ],
)
def test_a_chunk_is_expanded_where_that_takes_fewer_products(
    num_tokens: int, num_cached: int, expands: bool
) -> None:
    chunk = PrefillChunk(0, num_tokens, num_cached)
    assert BACKEND.order([chunk, PrefillChunk(1, 2, 0)])[-1] == (
        chunk if expands else PrefillChunk(1, 2, 0)
    )
    order = _order([PrefillChunk(1, 2, 0), *[chunk] * 20], 0)
    first, end = BACKEND._expanded(order)
    assert (end - first == 20) == expands and (first == end) != expands
    # As many products, of queries in one form and of keys and values in the other.
    pairs = num_tokens * num_cached + num_tokens**2 / 2
    absorbed, expanded = pairs * (2 * 512 + 64), pairs * (192 + 128) + num_cached * 512 * 256
    if num_tokens >= 64:
        assert expands == (expanded < absorbed)


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "expands"),
    [(2048, 0, True), (2049, 0, True), (4096, 3904, True), (4096, 3905, False), (600, 9000, False)],
)
def test_a_chunk_that_chooses_is_expanded_up_to_a_context(
    num_tokens: int, num_cached: int, expands: bool
) -> None:
    backend = replace(BACKEND, dense_tokens=2048, masked_tokens=8000)
    order = _order([PrefillChunk(0, num_tokens, num_cached)], 0)
    assert (backend._expanded(order) == (0, 1)) == expands
    assert replace(backend, masked_tokens=0)._expanded(order)[1] == (num_tokens + num_cached < 2049)


@given(ending=chunk_lists, leaving=chunk_lists, num_decodes=st.integers(0, 2))
def test_chunks_to_expand_lie_together(
    ending: list[PrefillChunk], leaving: list[PrefillChunk], num_decodes: int
) -> None:
    ordered = [BACKEND.order(chunks) for chunks in (ending, leaving)]
    for before, after in zip((ending, leaving), ordered, strict=True):
        assert sorted(before) == sorted(after)
        for expanded in (True, False):
            kept = [[c for c in part if _is_long(c) == expanded] for part in (before, after)]
            assert kept[0] == kept[1], "chunks of a kind stay in order"
    chunks = ordered[0] + ordered[1]
    first, end = BACKEND._expanded(_order(chunks, num_decodes))
    chosen = chunks[max(0, first - num_decodes) : max(0, end - num_decodes)]
    long = [chunk for chunk in chunks if _is_long(chunk)]
    if sum(chunk.num_tokens for chunk in long) > PROMPT_TOKENS[-1]:
        assert [chunk for chunk in chosen if _is_long(chunk)] == long
    if sum(chunk.num_tokens for chunk in chunks) <= PROMPT_TOKENS[-1]:
        assert not chosen, "a recorded step may have as many tokens"


def test_graphs_are_absorbed_or_of_whole_prompts() -> None:
    """One form each, by the number of tokens; deterministic mode has one for all."""

    def graph_ok(num_decodes: int, *chunks: tuple[int, int]) -> tuple[bool, bool]:
        order = _order([PrefillChunk(0, *chunk) for chunk in chunks], num_decodes)
        return BACKEND.graph_ok(order), LatentBackend(fixed_order=True).graph_ok(order)

    assert (
        graph_ok(0, (512, 0)) == graph_ok(1, (511, 0)) == graph_ok(0, (500, 3000)) == (True, True)
    )
    assert graph_ok(0, (513, 0)) == graph_ok(0, (30, 0), (700, 0)) == (True, True)
    assert graph_ok(1, (600, 0)) == graph_ok(0, (600, 7)) == graph_ok(0, (600, 0), (5, 1))
    assert graph_ok(1, (600, 0)) == (False, True)
    assert PROMPT_TOKENS[-1] == BACKEND.fewest_of_step - 1


def test_recorded_steps_choose_whatever_they_are_recorded_with() -> None:
    """The graph of a step that may lie behind a longer context chooses what is attended, too, and a
    step that may be recorded does as its graph: in deterministic mode any, else of few tokens."""
    sizes = {"dense_tokens": 2048, "recorded_tokens": 4096, "recorded_context": 131_072}
    absorbed, both = LatentBackend(fixed_order=True, **sizes), replace(BACKEND, **sizes)
    for num_tokens in (64, 512, 1024, 2048, 4096):
        recorded = BatchOrder.of_graph(GraphKey(8, num_tokens, samples=True))
        order = replace(recorded, is_recorded=False)
        assert absorbed._longest(order) == 131_072
        assert (both._longest(order) == 131_072) == (num_tokens < both.fewest_of_step)
        assert absorbed._longest(recorded) == both._longest(recorded) == 131_072
    decodes = BatchOrder.of_graph(GraphKey.of_decodes(8, 1, samples=True))
    assert absorbed._longest(decodes) == both._longest(decodes) == 131_072


def _is_long(chunk: PrefillChunk) -> bool:
    return BACKEND._is_expanded(chunk)


def _order(chunks: list[PrefillChunk], num_decodes: int) -> BatchOrder:
    query_lens = [1] * num_decodes + [chunk.num_tokens for chunk in chunks]
    cached = [9] * num_decodes + [chunk.num_computed for chunk in chunks]
    lengths = np.array(query_lens, np.int32)
    return BatchOrder(
        rows=np.zeros(len(query_lens), np.int32),
        query_lens=lengths,
        seq_lens=lengths + np.array(cached, np.int32),
        num_decodes=num_decodes,
        num_sampled=len(query_lens),
    )


@given(
    chunks=st.lists(
        st.builds(PrefillChunk, st.just(0), st.integers(1, 60), st.integers(0, 200)), min_size=1
    ),
    most_tokens=st.integers(1, 300),
)
def test_passes_have_each_position_once(chunks: list[PrefillChunk], most_tokens: int) -> None:
    passes = context_ranges(chunks, most_tokens)
    own = sum(chunk.num_tokens for chunk in chunks)
    seen: list[list[int]] = [[] for _ in chunks]
    for number, part in enumerate(passes):
        requests = [piece.request for piece in part]
        assert requests == list(range(requests[0], requests[-1] + 1)), "they lie together"
        size = sum(piece.end - piece.start for piece in part)
        assert 0 < size <= (max(most_tokens, own) if number == 0 else most_tokens)
        for piece in part:
            seen[piece.request] += range(piece.start, piece.end)
            if number > 0:
                assert piece.end <= chunks[piece.request].num_computed, "causal in no other pass"
    for positions, chunk in zip(seen, chunks, strict=True):
        assert sorted(positions) == list(range(chunk.num_computed + chunk.num_tokens))
    fits = sum(chunk.num_tokens + chunk.num_computed for chunk in chunks) <= most_tokens
    assert len(passes) == 1 or not fits


def test_deterministic_mode_has_one_form(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path), device=DeviceConfig(deterministic=True))
    backend = choose_attention(config, torch.device("cpu"), latent=DEEPSEEK)
    assert backend == LatentBackend(fixed_order=True)
    assert backend.graph_ok(_order([PrefillChunk(0, 4096, 0)], 0))
    assert not backend.expands_contexts


def test_the_library_is_taken_where_it_has_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(tiny_config(tmp_path))
    cpu = torch.device("cpu")
    assert choose_attention(config, cpu, latent=DEEPSEEK) == LatentBackend(shape=DEEPSEEK)
    sizes = flash_attention._UNLIKE_SIZES
    monkeypatch.setattr(flash_attention, "is_available", lambda dtype, *size: size[::2] in sizes)
    monkeypatch.setattr(flash_attention, "is_installed", lambda *package: True)
    monkeypatch.setattr(flash_attention, "forward_kernel", lambda package: print)
    backend = choose_attention(config, cpu, latent=DEEPSEEK)
    assert isinstance(backend, LatentBackend) and isinstance(backend.ragged, FlashRagged)
    odd = LatentSpec(q_rank=0, kv_rank=512, nope=96, rope=64, value=128, scale=0.1)
    assert choose_attention(config, cpu, latent=odd) == LatentBackend(shape=odd)

    def no_symbol(package: str) -> object:
        raise ImportError("no symbol")

    monkeypatch.setattr(flash_attention, "forward_kernel", no_symbol)
    assert choose_attention(config, cpu, latent=DEEPSEEK) == LatentBackend(shape=DEEPSEEK)
    assert "is installed but does not load: no symbol" in caplog.text


@pytest.mark.parametrize(
    ("limits", "lengths", "num_cached"),
    [
        ((2048, 64, 40_000), [2048], 37_952),
        ((8192, 64, 4096), [2048] * 4, 2048),
        ((8192, 2, 4096), [2048] * 2, 2048),
        ((16, 4, 1), [1] * 4, 0),
    ],
)
def test_memory_is_measured_behind_long_contexts(
    limits: tuple[int, int, int], lengths: list[int], num_cached: int, tmp_path: Path
) -> None:
    num_tokens, max_num_reqs, max_model_len = limits
    model = replace(tiny_config(tmp_path).model, max_model_len=max_model_len)
    usual = largest_steps(num_tokens, max_num_reqs, model, expands_contexts=False)
    *others, step = largest_steps(num_tokens, max_num_reqs, model, expands_contexts=True)
    assert others == usual and len(usual) == 1
    assert (step.lengths, step.num_cached) == (lengths, num_cached)
    if max(limits) > 2 * PASS_TOKENS:
        chunks = [PrefillChunk(0, length, num_cached) for length in lengths]
        assert len(context_ranges(chunks, PASS_TOKENS)) > 1
