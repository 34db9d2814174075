"""Tests that warming up compiles every kernel that steps of the scheduler need: the launchers of
whole models run on meta tensors, and Triton's own keys of what they would launch are compared."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bench.engine.models.shapes import shape_config
from engine.config import EngineConfig
from engine.contracts.steps.step_launches import GraphKey
from engine.explain.explanation import Batch, explain, order_of
from engine.explain.kernel_keys import batch_of_graph, kernel_keys, warm_up_batches
from engine.explain.launched_kernels import KernelKey
from engine.models.recorded_steps import recorded_steps
from engine.models.registry import spec_of
from tandem_kernels.device import KNOWN_GPUS
from tandem_kernels.gemm.small_m_shapes import MAX_ROWS

pytest.importorskip("triton")

H200 = KNOWN_GPUS["h200"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama-3.1-8b", {"num_layers": 1}),
    "dense fp8": ("llama-3.1-8b", {"num_layers": 2, "quantization": "fp8"}),
    "experts": ("qwen3-30b-a3b", {"num_layers": 2, "quantization": "fp8"}),
    "windows": ("gpt-oss-20b", {"num_layers": 2}),
    "latents": ("deepseek-v2-lite", {"num_layers": 2}),
    "sparse latents": ("deepseek-v3.2-6-layers", {"num_layers": 1, "quantization": "fp8"}),
    "sparse blocks": ("minimax-m3-4-layers", {}),
    "rows": ("deepseek-v4-flash-3-layers", {}),
    "states": ("qwen3.5-35b-a3b", {"num_layers": 2, "full_attention_interval": 2}),
    "heads by layer": (
        "mimo-v2-flash-7-layers",
        {"num_layers": 4, "hybrid_layer_pattern": [0, 1, 0, 1]},
    ),
    "experts beside dense": (
        "gemma-4-26b-a4b",
        {"num_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "shared keys": ("gemma-4-e4b-4-layers", {}),
}
"""Layers of each kind, and of each that comes before or after another; more need the same."""
NUM_DRAWN = 16


@pytest.fixture(scope="module", autouse=True)
def launchers_forget() -> Iterator[None]:
    """Clears what launchers keep for a device: it is made of meta tensors here."""
    yield
    for name in [name for name in sys.modules if name.startswith("tandem_kernels")]:
        for kept in vars(sys.modules[name]).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


@cache
def config_of(family: str) -> EngineConfig:
    shape, changes = FAMILIES[family]
    return shape_config(shape, max_model_len=24_576, **changes)


def drawn(chance: random.Random, config: EngineConfig) -> Batch:
    """Returns a step as the scheduler makes them: decodes, chunks, prefixes that were found."""
    near = MAX_ROWS + chance.choice((0, 1, 2))
    decodes = chance.choice((0, 0, 1, 2, 5, 14, 50, near, chance.randint(0, 200)))
    longest = chance.choice((4, 60, 500, 8000))
    room = config.scheduler.max_num_batched_tokens - decodes
    prompts: list[int] = []
    for _ in range(chance.choice((1, 1, 2, 4, 8, 30)) if decodes else chance.randint(1, 8)):
        length = round(longest ** chance.random())
        if length <= room:
            prompts.append(length)
            room -= length
    cached = chance.choice((0, 0, 0, 50, 1000, 15_000))
    batch = Batch(decodes, chance.randint(2, 20_000), tuple(prompts), cached)
    asks_for_all = chance.random() < 0.1
    return replace(batch, num_logits=batch.num_tokens) if asks_for_all else batch


def not_warmed(
    config: EngineConfig, steps: list[Batch], *, has_flash: bool = True
) -> dict[Batch, list[KernelKey]]:
    """Returns the kernels that steps need and warming up leaves out. Warms up no further than until
    it has them all, first by the graphs that steps find: what follows adds kernels, and takes none
    away."""
    graphs = graphs_of(config, steps)
    warm_up = sorted(warm_up_batches(config), key=lambda batch: batch not in graphs)
    if not graphs:  # What stands in for them comes last.
        warm_up.reverse()
    batches = [*steps, *warm_up]
    with closing(kernel_keys(config, H200, batches, has_flash=has_flash)) as found:
        needed = dict(zip(steps, found, strict=False))
        wanted = set[KernelKey]().union(*needed.values())
        assert any(keys != wanted for keys in needed.values()), "steps differ in their kernels"
        known: set[KernelKey] = set()
        for keys in found:
            known |= keys
            if wanted <= known:
                break
    return {step: sorted(keys - known) for step, keys in needed.items() if keys - known}


def graphs_of(config: EngineConfig, steps: list[Batch]) -> set[Batch]:
    """Returns the steps with which the graphs are recorded that these steps find."""
    launches = recorded_steps(config)
    found = [launches.find(order_of(step).parts()) for step in steps]
    return {batch_of_graph(key, config) for key in found if isinstance(key, GraphKey)}


@pytest.mark.parametrize(
    ("family", "has_flash"),
    [
        ("dense", True),
        ("dense", False),
        ("dense fp8", True),
        ("experts", False),
        ("windows", False),
        ("latents", True),
        ("sparse latents", True),
        ("sparse blocks", True),
        ("rows", False),
        ("states", True),
        ("heads by layer", True),
        ("experts beside dense", False),
        ("shared keys", False),
    ],
)
def test_steps_need_nothing_that_warming_up_has_not_compiled(family: str, has_flash: bool) -> None:
    config, chance = config_of(family), random.Random(f"{family} {has_flash}")
    steps = [drawn(chance, config) for _ in range(NUM_DRAWN)]
    if spec_of(config.model).dense_tokens is not None:
        # Of many short prompts no graph holds, an indexer chooses nothing, and decodes beside
        # chunks attend to all of short contexts, cut into parts by their number.
        steps += [
            Batch(1, 900, (1000,) * 7),
            Batch(2, 900, (40, 1100)),
            Batch(0, 0, (700, 30), 500),
        ]
        steps += [Batch(count, 900, (1100,)) for count in (1, 3, 7, 12, 17, 40, 200)]
    assert not_warmed(config, steps, has_flash=has_flash) == {}
    steps += [Batch(count, 20_000, (64,)) for count in (1, 8, 60, 200)]
    assert graphs_of(config, steps) <= set(warm_up_batches(config))


@pytest.mark.parametrize(
    ("family", "max_num_seqs", "eager"),
    [
        ("rows", 16, False),
        ("sparse latents", 5, True),
        ("sparse blocks", 5, True),
        ("states", 5, True),
    ],
)
def test_small_batches_need_nothing_more_with_and_without_graphs(
    family: str, max_num_seqs: int, eager: bool
) -> None:
    """Steps have few requests, and some engines launch all their kernels one by one."""
    config, chance = config_of(family), random.Random(f"{family} {max_num_seqs}")
    config = replace(
        config,
        scheduler=replace(config.scheduler, max_num_seqs=max_num_seqs),
        device=replace(config.device, enforce_eager=eager),
    )
    steps = [
        step
        for step in (drawn(chance, config) for _ in range(8 * NUM_DRAWN))
        if 0 < step.num_decodes + len(step.prompts) <= max_num_seqs
    ]
    steps = [*steps[: NUM_DRAWN // 2], Batch(max_num_seqs, 500)]
    assert not_warmed(config, steps) == {}


def test_chunks_beside_long_contexts_are_graphs_where_their_decodes_are_cut() -> None:
    steps = [Batch(count, 20_000, (64,)) for count in (1, 60, 200)]
    for family, is_cut in {"dense": True, "latents": True, "rows": False}.items():
        launches = recorded_steps(config_of(family))
        found = [launches.find(order_of(step).parts()) for step in steps]
        assert all(isinstance(one, GraphKey) and one.any_context for one in found) == is_cut


def test_streams_of_many_tokens_have_few_kernels() -> None:
    """Parts of their products are as many as fill the device: a kernel takes any number of them."""
    steps = [Batch(prompts=(length,)) for length in (100, 300, 700, 1500)]
    found = kernel_keys(config_of("rows"), H200, steps)
    norms = [{key for key in keys if key.kernel == "norm_streams_kernel"} for keys in found]
    assert all(norms) and all(some == norms[0] for some in norms)


def test_what_was_not_warmed_is_found() -> None:
    """A prompt of 640 tokens has tiles that 16 decodes do not take."""
    few, more = kernel_keys(config_of("dense"), H200, [Batch(16), Batch(prompts=(640,))])
    assert {key.kernel for key in more - few} >= {"prefill_attention_kernel"}
    (again,) = kernel_keys(config_of("dense"), H200, [Batch(16)])
    assert again == few


@pytest.mark.parametrize("family", ["dense", "windows", "latents"])
def test_kernels_that_are_explained_are_launched(family: str) -> None:
    """On both sides of each number of rows at which other kernels compute them. Five decodes are
    those of the graph of eight."""
    config, batches = config_of(family), [Batch(count, 900) for count in (1, 2, 5, 9, 17, 65)]
    (recorded,) = graphs_of(config, [batches[2]])
    assert recorded.num_decodes == 8
    steps = [next(iter(graphs_of(config, [batch]))) for batch in batches]
    keys = kernel_keys(config, H200, steps, has_flash=False)
    launched = [{key.kernel for key in found} for found in keys]
    explained = explain(config, H200, batches)
    for batch, found, kernels in zip(batches, explained, launched, strict=True):
        rows = [row for _, rows in found.choices for row in rows]
        told = {name for row in rows for name in re.findall(r"\w+_kernel\b", row.kernel)}
        assert told and told <= kernels, batch
