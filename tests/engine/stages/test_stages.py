"""Engines with several pipeline stages give the tokens of an engine with one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from tests.engine.kv_groups.grouped_node import GroupedNode, run_until
from tests.engine.stages.thread_executor import ThreadExecutor
from tests.engine.tiny_model import tiny_model

NUM_LAYERS = 5
PROMPTS = {
    f"r{i}": [1 + (i * 31 + j * 7) % 210 for j in range(length)]
    for i, length in enumerate((1, 3, 40, 64, 17, 80, 8, 33))
}
BEHIND_A_PREFIX = {"behind": [*PROMPTS["r3"][:48], 5, 6, 7]}


def stage_config(
    stages: int, tp_size: int = 1, num_blocks: int = 200, chunk: int = 24, **model: Any
) -> EngineConfig:
    return EngineConfig(
        engine_id=f"stages-{secrets.token_hex(4)}",
        epoch=secrets.randbits(63),
        model=tiny_model(num_layers=NUM_LAYERS, **model),
        cache=CacheConfig(block_size=8, num_blocks=num_blocks),
        parallel=ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=stages),
        scheduler=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=chunk, async_scheduling=True
        ),
    )


@contextmanager
def running(config: EngineConfig) -> Iterator[GroupedNode]:
    kind = ThreadExecutor if config.parallel.world_size > 1 else UniprocExecutor
    executor = kind(config)
    core = EngineCore(config, executor, lambda *_: None)
    node = GroupedNode(config, core, executor, None)
    try:
        yield node
        node.check_empty()
    finally:
        node.shutdown()


def answers(node: GroupedNode, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        node.add(name, prompt, 14)
    run_until([node], lambda: node.ended.issuperset(prompts))
    return {name: node.tokens[name] for name in prompts}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    with running(stage_config(1)) as node:
        return {**answers(node, PROMPTS), **answers(node, BEHIND_A_PREFIX)}


@pytest.mark.parametrize(("stages", "tp_size"), [(2, 1), (4, 1), (2, 2)])
def test_stages_give_the_same_tokens(
    stages: int, tp_size: int, expected: dict[str, list[int]]
) -> None:
    """Prompts in chunks beside rows that decode, then one behind a cached prefix."""
    with running(stage_config(stages, tp_size)) as node:
        found = answers(node, PROMPTS)
        cached = node.core.stats().prefix_cache_hits
        found |= answers(node, BEHIND_A_PREFIX)
        assert node.core.stats().prefix_cache_hits - cached == 48
        assert isinstance(node.executor, ThreadExecutor)
        assert node.executor.max_in_flight == stages + 1
    assert found == expected


def test_rows_that_are_preempted_go_on(expected: dict[str, list[int]]) -> None:
    with running(stage_config(2, num_blocks=16)) as node:
        assert answers(node, PROMPTS) == {name: expected[name] for name in PROMPTS}
        assert node.core.stats().num_preemptions > 0


def test_a_tied_head_is_read_by_the_last_stage() -> None:
    found = []
    for stages in (1, 3):
        with running(stage_config(stages, tie_word_embeddings=True)) as node:
            found.append(answers(node, PROMPTS))
    assert found[0] == found[1]
