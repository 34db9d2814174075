"""Experts that move while an engine runs: its answers stay those of one rank, token for token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.contracts.errors import EngineDeadError
from engine.core.core import EngineCore
from engine.eplb_config import EplbConfig
from engine.expert_placement import copies_of
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.models.checkpoint import load_model_config
from engine.worker.worker import Worker
from tests.engine.kv_groups.grouped_node import GroupedNode, run_until
from tests.engine.models.parity_cases import prompts
from tests.engine.thread_executor import ThreadExecutor

NUM_TOKENS = 14


def config_of(folder: Path, parallel: ParallelConfig) -> EngineConfig:
    return EngineConfig(
        engine_id=f"balanced-{parallel.num_ranks}",
        epoch=1,
        model=load_model_config(folder),
        cache=CacheConfig(block_size=16, num_blocks=60),
        parallel=parallel,
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48, async_scheduling=True),
    )


@contextmanager
def node_of(folder: Path, parallel: ParallelConfig) -> Iterator[GroupedNode]:
    config = config_of(folder, parallel)
    executor = ThreadExecutor(config)
    node = GroupedNode(config, EngineCore(config, executor, lambda *_: None), executor, None)
    try:
        yield node
    finally:
        node.shutdown()


def answers(node: GroupedNode, turn: str = "") -> list[list[int]]:
    names = [f"{turn}{index}" for index in range(3)]
    for name, prompt in zip(names, prompts()[:3], strict=True):
        node.add(name, prompt, NUM_TOKENS)
    run_until([node], lambda: node.ended.issuperset(names))
    return [node.tokens[name] for name in names]


def workers_of(node: GroupedNode) -> list[Worker]:
    """Returns the workers, none of which is in a step any more."""
    assert isinstance(node.executor, ThreadExecutor)
    run_until([node], lambda: node.core.is_idle)
    node.executor._on_all(lambda worker: None)
    return node.executor.workers


def blocks_of(worker: Worker) -> list[SparseMLP]:
    assert worker.balancer is not None
    return worker.balancer._blocks


def addresses(worker: Worker) -> list[int]:
    """Returns where all that a recorded graph reads of experts lies."""
    tensors = [
        tensor
        for block in blocks_of(worker)
        for tensor in (*block.experts.parameters(), block.router.own_numbers, block.router.loads)
    ]
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize(
    ("family", "redundant", "sizes"),
    [
        ("mixtral", 2, {"tensor_parallel_size": 2}),
        ("gpt_oss", 6, {"tensor_parallel_size": 4}),
        ("deepseek_v3_yarn", 4, {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ],
)
def test_answers_stay_the_same_while_experts_move(
    family: str, redundant: int, sizes: dict[str, int], checkpoints: Path
) -> None:
    """Biases, stacked tensors, groups with tokens of their own; step by step and in between. What
    moved is bit for bit what the checkpoint has, in its old place in memory."""
    folder = checkpoints / family
    with node_of(folder, ParallelConfig()) as alone:
        expected = answers(alone)
    eplb = EplbConfig(window_size=5, step_interval=7, num_redundant_experts=redundant)
    parallel = ParallelConfig(**sizes, enable_expert_parallel=True, eplb=eplb)
    with node_of(folder, parallel) as node:
        workers = workers_of(node)
        before = [addresses(worker) for worker in workers]
        originals = weights_of_experts(workers)
        assert [answers(node, turn) for turn in "ab"] == [expected] * 2
        workers = workers_of(node)
        assert [addresses(worker) for worker in workers] == before
        balancers = [worker.balancer for worker in workers if worker.balancer is not None]
        assert len(balancers) == parallel.num_ranks
        assert all(one.placements == balancers[0].placements for one in balancers)
        assert all(one.stats == balancers[0].stats for one in balancers)
        stats = balancers[0].stats
        assert stats.num_rearrangements > 0 and stats.num_moved > 0
        assert 0 < stats.balancedness <= 1 and 0 < stats.planned_balancedness <= 1 + 1e-9
        moved = weights_of_experts(workers)
        assert moved.keys() == originals.keys()
        for key, copies in moved.items():
            assert all(torch.equal(copy, originals[key][0]) for copy in copies)


def weights_of_experts(workers: list[Worker]) -> dict[tuple[int, int, str], list[torch.Tensor]]:
    """Maps (layer, expert, tensor) to its copies on all ranks, by where the ranks believe that they
    are."""
    found: dict[tuple[int, int, str], list[torch.Tensor]] = {}
    for layer, of_ranks in enumerate(zip(*map(blocks_of, workers), strict=True)):
        balancer = workers[0].balancer
        assert balancer is not None
        total = of_ranks[0].experts.sizes.total
        for expert, copies in enumerate(copies_of(balancer.placements[layer], total)):
            for rank, slot in copies:
                for name, tensor in of_ranks[rank].experts.named_parameters():
                    found.setdefault((layer, expert, name), []).append(tensor[slot].clone())
    return found


def test_a_rank_that_is_killed_while_experts_move_ends_the_engine(checkpoints: Path) -> None:
    """Experts are placed anew in each step: the other rank waits in an exchange. The core knows
    of the moves before."""
    eplb = EplbConfig(window_size=1, step_interval=1, num_redundant_experts=2)
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, eplb=eplb)
    node = GroupedNode.start(config_of(checkpoints / "mixtral", parallel))
    try:
        for name, prompt in enumerate(prompts()[:3]):
            node.add(str(name), prompt, 10 * NUM_TOKENS)
        run_until([node], lambda: (stats := node.core.stats().experts) and stats.num_moved > 0)
        killed = node.executor.worker_pids[1]
        os.kill(killed, signal.SIGSTOP)
        node.core.step()
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker 1 was killed by SIGKILL"):
            run_until([node], lambda: len(node.ended) == 3)
    finally:
        node.shutdown()


@pytest.mark.multi_gpu
def test_gpus_answer_the_same_while_experts_move(checkpoints: Path) -> None:
    """Graphs read what moved: they are recorded before."""
    eplb = EplbConfig(window_size=5, step_interval=7, num_redundant_experts=2)
    found = []
    for chosen in (None, eplb):
        parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, eplb=chosen)
        config = config_of(checkpoints / "mixtral", parallel)
        node = GroupedNode.start(replace(config, device=DeviceConfig(device="cuda")))
        try:
            found += [answers(node, turn) for turn in "ab"]
            stats = node.core.stats().experts
            assert (stats is not None and stats.num_moved > 0) == (chosen is not None)
        finally:
            node.shutdown()
    assert found == [found[0]] * 4
