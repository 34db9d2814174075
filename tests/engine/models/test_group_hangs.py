"""Groups do what made ranks of other systems wait for ever: their steps are not alike, and ranks
are gone while others compute with them."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import AbortRequests
from engine.core.core import EngineCore
from engine.executor.multiproc_executor import MultiprocExecutor
from engine.models.checkpoint import load_model_config
from engine.sched.groups.group_scheduler import GroupScheduler
from tests.engine.kv_groups.grouped_node import TIMEOUT_S, GroupedNode, run_until
from tests.engine.models.parity_cases import prompts
from tests.engine.models.test_data_parallel import DP2, node_of

NUM_TOKENS = 40


def answer_alone(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    with node_of(folder, ParallelConfig()) as alone:
        alone.add("0", prompt, num_tokens)
        run_until([alone], lambda: "0" in alone.ended)
        return alone.tokens["0"]


def groups_of(node: GroupedNode) -> GroupScheduler:
    assert isinstance(node.core.scheduler, GroupScheduler)
    return node.core.scheduler


def test_one_group_preempts_and_the_other_goes_on(checkpoints: Path) -> None:
    """Two requests grow beyond the blocks of their group: 7 each of 12. A third has the other one
    alone."""
    folder, prompt = checkpoints / "deepseek_v2", prompts()[3]
    expected = answer_alone(folder, prompt, NUM_TOKENS)
    with node_of(folder, DP2, cache=CacheConfig(block_size=16, num_blocks=12)) as node:
        names = [f"crowded {i}" for i in range(2)]
        for name in names:
            node.add(name, [*prompt], NUM_TOKENS, group=0)
        node.add("alone", prompt, NUM_TOKENS, group=1)
        run_until([node], lambda: node.ended.issuperset([*names, "alone"]))
        preemptions = [group.stats().num_preemptions for group in groups_of(node).groups]
        assert preemptions[0] > 0 and preemptions[1] == 0
        assert all(node.tokens[name] == expected for name in (*names, "alone"))
        node.check_empty()


def test_a_prompt_that_is_aborted_halfway_leaves_the_other_group_alone(checkpoints: Path) -> None:
    """It is taken away between two chunks, while the other group decodes, and again while the other
    one has nothing to do."""
    folder, prompt = checkpoints / "deepseek_v2", prompts()[3] * 2
    expected = answer_alone(folder, prompts()[2], NUM_TOKENS)
    with node_of(folder, DP2) as node:
        groups = groups_of(node).groups
        for turn in ("beside", "alone"):
            if turn == "beside":
                node.add("goes on", prompts()[2], NUM_TOKENS, group=1)
                run_until([node], lambda: len(node.tokens["goes on"]) > 3)
            node.add(turn, prompt, NUM_TOKENS, group=0)
            run_until([node], lambda: groups[0].stats().num_running > 0)
            assert groups[0].stats().num_waiting_tokens > 0, "a chunk is left"
            node.core.handle(AbortRequests([turn]))
            run_until([node], lambda: node.core.is_idle)
            assert node.tokens[turn] == []
        assert node.tokens["goes on"] == expected
        node.check_empty()


@contextmanager
def processes_of(folder: Path, step_timeout_s: float) -> Iterator[GroupedNode]:
    """Yields two groups of one rank, each in a process."""
    config = EngineConfig(
        engine_id=f"hangs-{secrets.token_hex(4)}",
        epoch=1,
        model=load_model_config(folder),
        cache=CacheConfig(block_size=16, num_blocks=40),
        parallel=DP2,
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48, async_scheduling=True),
    )
    context = zmq.Context[zmq.Socket[bytes]]()
    executor = MultiprocExecutor(config, context, step_timeout_s=step_timeout_s)
    node = GroupedNode(config, EngineCore(config, executor, lambda *_: None), executor, context)
    try:
        yield node
    finally:
        node.shutdown()


def test_a_rank_that_is_gone_is_named_though_its_group_is_idle(checkpoints: Path) -> None:
    """The other one computes a prompt, and waits for it in the first layer with experts: as long as
    the watchdog lets it, or until the rank is dead."""
    with processes_of(checkpoints / "deepseek_v2", step_timeout_s=1.0) as node:
        assert isinstance(node.executor, MultiprocExecutor)
        gone = node.executor.worker_pids[1]
        os.kill(gone, signal.SIGSTOP)
        node.add("0", prompts()[3], NUM_TOKENS, group=0)
        reason = r"within 1 s: .*worker 1 has not taken the step \(process state T\)"
        with pytest.raises(EngineDeadError, match=reason):
            run_until([node], lambda: "0" in node.ended)
        os.kill(gone, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker 1 was killed by SIGKILL"):
            assert node.executor._children[1].wait(TIMEOUT_S)
            node.executor.collect()
