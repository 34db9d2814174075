"""Warm-up computes a step of each way in which steps of the scheduler may run kernels of prompts,
so that none is compiled while somebody waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.layers.attention.backend import AttentionBackend, AttentionSpec, PrefillChunk
from engine.layers.attention.paged import PagedBackend
from engine.layers.attention.whole_prompts.uncached_prefill import (
    DensePrefill,
    UncachedPrefillBackend,
)
from engine.models.recorded_steps import PROMPT_TOKENS
from engine.worker.dummy_steps import warm_up_steps
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.experts.expert_rows import ExpertRows
from tandem_kernels.experts.expert_tuning import ExpertShape, expert_tuning, searched_pairs
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds

CPU = torch.device("cpu")
FUSED_QKV_ROWS = gemm_thresholds(CPU).fused_qkv_rows
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128


class LibraryOf(DensePrefill):
    """Attends to nothing, from so many tokens on."""

    name = "a library"

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens

    def attend(self, spec: Any, heads: Tensor, metadata: Any) -> Tensor:
        return spec.queries(heads)

    def prepare(self, *sizes: Any) -> None:
        raise NotImplementedError


@dataclass
class Order:
    """The host's view of a step."""

    query_lens: np.ndarray
    seq_lens: np.ndarray
    num_decodes: int
    decode_query_len: int = 1
    is_recorded: bool = False
    hides_decodes: bool = False


@dataclass
class Batch:
    """The device's view, of which all tensors have a shape alone."""

    order: Order
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    window: int | None = None


def tunings_of(
    config: EngineConfig, min_tokens: int, requests: list[tuple[int, int]]
) -> set[tuple[int, ...]]:
    """Returns the tunings that a step takes of `prefill_attention_kernel`. `requests`: (tokens,
    cached tokens) of each; those of one token decode. `min_tokens`: from which a library attends;
    0: there is none."""
    from tandem_kernels.attention.prefill_attention import tuning_of

    found: set[tuple[int, ...]] = set()
    block_size, ranks = config.cache.block_size, config.parallel.tensor_parallel_size
    num_heads, num_kv_heads = NUM_HEADS // ranks, NUM_KV_HEADS // ranks
    cache = torch.empty(1, 2, num_kv_heads, block_size, HEAD_DIM, device="meta", dtype=torch.half)

    def kernel(q: Tensor, kv_cache: Tensor, metadata: Any, scale: float) -> Tensor:
        if metadata.num_decodes < len(metadata.seq_lens):
            tuning = tuning_of(q, cache, metadata)
            found.add((tuning.rows, tuning.tile, tuning.num_warps, tuning.num_stages))
        return q

    backend = backend_of(min_tokens, PagedBackend(kernel))
    metadata = metadata_of(backend, requests)
    width = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    num_tokens = sum(tokens for tokens, _ in requests)
    heads = torch.empty(num_tokens, width, device="meta", dtype=torch.half)
    spec = AttentionSpec(num_heads, num_kv_heads, HEAD_DIM, 1.0)
    backend.attend(spec, heads, cache, metadata)
    return found


def backend_of(min_tokens: int, paged: PagedBackend) -> AttentionBackend:
    if not min_tokens:
        return paged
    library = LibraryOf(min_tokens)
    return UncachedPrefillBackend(library, paged, recorded_tokens=PROMPT_TOKENS[-1])


def metadata_of(backend: AttentionBackend, requests: list[tuple[int, int]]) -> AttentionMetadata:
    """Returns the metadata of a step, of tensors that have a shape alone."""
    decodes = [request for request in requests if request[0] == 1]
    prompts = [
        PrefillChunk(row, *request) for row, request in enumerate(requests) if request[0] > 1
    ]
    both = decodes + [(chunk.num_tokens, chunk.num_computed) for chunk in backend.order(prompts)]
    query_lens = np.array([tokens for tokens, _ in both], np.int32)
    seq_lens = query_lens + np.array([cached for _, cached in both], np.int32)
    order = Order(query_lens, seq_lens, len(decodes))
    starts = torch.tensor([0, *np.cumsum(query_lens)], device="meta")
    shape = torch.empty(len(both), device="meta")
    return backend.metadata(Batch(order, shape[:, None], starts, shape))


TOKENS = (2, 4, 5, 16, 17, 64, 65, 129, 511, 513, 700, 1023, 1024, 1500, 2040, 4100)
CACHED = (0, 16, 1600, 3000, 5000)
DECODES = ([], [16], [16] * 3, [5000], [16] * 60)


@pytest.mark.parametrize("min_tokens", [0, 1024, 4096], ids=["none", "FlashAttention", "cuDNN"])
@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "ranks"), [(4, 2048, 1), (64, 8192, 2), (64, 8192, 8), (256, 512, 1)]
)
def test_every_tuning_is_warmed_up(
    make_config, max_num_seqs: int, budget: int, ranks: int, min_tokens: int
) -> None:
    """Steps of prompts alone and beside decodes, behind short and long contexts."""
    config = make_config()
    parallel = replace(config.parallel, tensor_parallel_size=ranks)
    heads = replace(config.model, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
    config = replace(config, parallel=parallel, model=heads)
    limits = replace(config.scheduler, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    for max_model_len, block_size in ((9216, 128), (9216, 64), (3000, 16)):
        model = replace(config.model, max_model_len=max_model_len)
        cache = replace(config.cache, block_size=block_size)
        config = replace(config, scheduler=limits, model=model, cache=cache)
        warm: set[tuple[int, ...]] = set()
        for step in warm_up_steps(config, CPU):
            requests = [(length, step.num_cached) for length in step.lengths]
            warm |= tunings_of(config, min_tokens, requests)
        for tokens, cached, decodes in itertools.product(TOKENS, CACHED, DECODES):
            longest = max([tokens + cached, *decodes])
            if len(decodes) + 1 > max_num_seqs or longest > max_model_len:
                continue
            if len(decodes) + tokens > budget:
                continue
            requests = [(1, context) for context in decodes] + [(tokens, cached)]
            assert tunings_of(config, min_tokens, requests) <= warm, requests


@pytest.mark.parametrize("min_tokens", [0, 1024, 4096], ids=["none", "FlashAttention", "cuDNN"])
@pytest.mark.parametrize(
    ("max_model_len", "budget", "max_num_seqs"),
    [(9216, 8192, 64), (9216, 8192, 1), (FUSED_QKV_ROWS, 8192, 64), (3000, 8192, 16)],
)
def test_both_kinds_of_fused_projection_are_warmed_up(
    make_config: Any, max_model_len: int, budget: int, max_num_seqs: int, min_tokens: int
) -> None:
    """Steps of many tokens rotate in the GEMM, which keeps keys where a library reads new ones. The
    profiling run does not count: there is none where the operator gives the cache's size."""
    config = make_config()
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    config = replace(
        config,
        model=replace(config.model, max_model_len=max_model_len),
        scheduler=replace(config.scheduler, **limits),
    )
    backend = backend_of(min_tokens, PagedBackend())

    def kinds(steps: Iterator[list[tuple[int, int]]]) -> set[bool]:
        many = (step for step in steps if sum(tokens for tokens, _ in step) >= FUSED_QKV_ROWS)
        return {backend.reads_new_keys(metadata_of(backend, step)) for step in many}

    warm = kinds(
        [(length, step.num_cached) for length in step.lengths]
        for step in warm_up_steps(config, CPU)
    )
    possible = kinds(
        [(tokens, cached)] * count
        for tokens, cached, count in itertools.product((256, 1400, 2990, 4096), (0, 10), (1, 2, 16))
        if tokens + cached <= max_model_len and tokens * count <= budget and count <= max_num_seqs
    )
    assert possible and possible <= warm


@pytest.mark.parametrize("budget", [2048, 5000, 8192])
def test_every_tiling_of_the_experts_of_long_steps_is_warmed_up(
    make_config: Any, budget: int
) -> None:
    """Steps of up to 2048 tokens are recorded, which compiles theirs."""
    config = make_config()
    config = replace(
        config,
        model=replace(config.model, max_model_len=9216),
        scheduler=replace(config.scheduler, max_num_seqs=64, max_num_batched_tokens=budget),
    )
    shape, top_k = ExpertShape(128, 2880, 2880, "mxfp4"), 4

    def tunings(sizes: Iterable[int]) -> set[tuple[bool, object]]:
        return {
            (gated, expert_tuning(shape, top_k * size, "NVIDIA_H200", gated=gated))
            for size in sizes
            for gated in (True, False)
        }

    warm = tunings(sum(step.lengths) for step in warm_up_steps(config, CPU))
    assert tunings(range(2048, budget + 1)) <= warm


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        (ExpertShape(128, 384, 2048), 1),
        (ExpertShape(64, 768, 2048), 2),
        (ExpertShape(64, 1408, 2048), 2),
    ],
    ids=["slices", "whole experts", "whole experts of another table"],
)
def test_every_tiling_of_the_experts_of_groups_is_warmed_up(
    make_config: Any, shape: ExpertShape, ranks: int
) -> None:
    """Their steps with prompts are never recorded, and experts compute the tokens of all groups."""
    config = make_config()
    num_groups, top_k = 2, 8
    config = replace(
        config,
        parallel=replace(config.parallel, data_parallel_size=num_groups),
        model=replace(config.model, max_model_len=9216),
        scheduler=replace(config.scheduler, max_num_seqs=64, max_num_batched_tokens=8192),
    )

    def tilings(num_tokens: int) -> Iterator[tuple[object, ...]]:
        experts = torch.empty((num_groups * num_tokens, top_k), dtype=torch.int32, device="meta")
        found = experts if experts.numel() > searched_pairs(shape.weights) else None
        rows = ExpertRows(experts, shape.num_experts, found, found)
        for gated in (True, False):
            own = experts.numel() / ranks
            tuning = expert_tuning(shape, own, "NVIDIA_H200", gated=gated)
            yield gated, tuning, tuple(rows.tiles(tuning.rows)[1].items())

    warm = {one for step in warm_up_steps(config, CPU) for one in tilings(sum(step.lengths))}
    missing = {
        num_tokens: one
        for num_tokens in range(2, 8193)
        for one in tilings(num_tokens)
        if one not in warm
    }
    assert not missing
