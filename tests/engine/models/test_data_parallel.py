"""Data-parallel groups: they answer as one rank does, token for token, whatever the others do."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.contracts.group_step import GroupStep
from engine.contracts.messages import AbortRequests, PrefixAnswer
from engine.core.core import EngineCore
from engine.models.checkpoint import load_model_config
from engine.sched.groups.group_scheduler import GroupScheduler
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tests.engine.kv_groups.grouped_node import GroupedNode, hand_over, run_until
from tests.engine.models.parity_cases import prompts
from tests.engine.thread_executor import ThreadExecutor

NUM_TOKENS = 14
DP2 = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)


def config_of(
    folder: Path,
    parallel: ParallelConfig,
    kv_transfer: KVTransferConfig | None = None,
    **more: Any,
) -> EngineConfig:
    return EngineConfig(
        engine_id=f"groups-{secrets.token_hex(4)}",
        epoch=secrets.randbits(63),
        model=load_model_config(folder),
        cache=more.pop("cache", CacheConfig(block_size=16, num_blocks=40)),
        parallel=parallel,
        scheduler=SchedulerConfig(
            max_num_seqs=more.pop("rows", 3), max_num_batched_tokens=48, async_scheduling=True
        ),
        kv_transfer=kv_transfer,
        **more,
    )


@contextmanager
def node_of(
    folder: Path,
    parallel: ParallelConfig,
    kv_transfer: KVTransferConfig | None = None,
    **more: Any,
) -> Iterator[GroupedNode]:
    """Runs an engine whose ranks are threads of this process."""
    config = config_of(folder, parallel, kv_transfer, **more)
    executor = ThreadExecutor(config)
    node = GroupedNode(config, EngineCore(config, executor, lambda *_: None), executor, None)
    try:
        yield node
    finally:
        node.shutdown()


def answers(node: GroupedNode) -> dict[str, list[int]]:
    """Asks every prompt, the longest twice, and waits until nothing is left behind: where drafts
    were right, one more step is on its way when the last answer ends."""
    asked = {str(index): prompt for index, prompt in enumerate((*prompts(), prompts()[3]))}
    for name, prompt in asked.items():
        node.add(name, prompt, NUM_TOKENS)
    run_until([node], lambda: node.ended.issuperset(asked))
    run_until([node], lambda: not node.core.scheduler.check_empty())
    return dict(node.tokens)


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("deepseek_v2", DP2),
        ("deepseek_v4", DP2),
        ("mixtral", ParallelConfig(data_parallel_size=2)),
        ("mixtral", ParallelConfig(data_parallel_size=4, enable_expert_parallel=True)),
        (
            "deepseek_v3_yarn",
            ParallelConfig(
                data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True
            ),
        ),
        ("llama", ParallelConfig(data_parallel_size=2)),
    ],
)
def test_groups_answer_as_one_rank_does(
    family: str, parallel: ParallelConfig, checkpoints: Path
) -> None:
    """Experts as a whole and in slices, of ids of tokens, four groups, groups of two ranks, and a
    model without experts."""
    folder = checkpoints / family
    more = {"cache": CacheConfig(block_size=16, num_blocks=120)} if family == "deepseek_v4" else {}
    with node_of(folder, ParallelConfig(), **more) as alone:
        expected = answers(alone)
    with node_of(folder, parallel, **more) as groups:
        assert answers(groups) == expected
        assert isinstance(groups.executor, ThreadExecutor)
        steps = [step for step in groups.executor.steps if isinstance(step, GroupStep)]
        all_groups = range(parallel.data_parallel_size)
        used = [sum(step.steps[group] is not None for step in steps) for group in all_groups]
        assert min(used) >= NUM_TOKENS, "a request takes as many steps"
        assert any(step.num_decodes == 0 for step in steps)
        assert any(0 < step.num_decodes < step.num_tokens + 1 for step in steps)


@pytest.mark.multi_gpu
def test_gpus_answer_alike_by_writes_and_by_the_library(checkpoints: Path) -> None:
    """Steps are recorded, and one group has requests while the other has none."""
    found = []
    device = DeviceConfig(device="cuda")
    for all_reduce in ("auto", "nccl"):
        parallel = replace(DP2, all_reduce=all_reduce)
        node = GroupedNode.start(config_of(checkpoints / "mixtral", parallel, device=device))
        try:
            of_all = answers(node)
            node.add("alone", prompts()[0], NUM_TOKENS)
            run_until([node], lambda: "alone" in node.ended)  # noqa: B023
            found.append((of_all, node.tokens["alone"]))
        finally:
            node.shutdown()
    assert found[0] == found[1]


def test_a_group_without_requests_takes_part(checkpoints: Path) -> None:
    """One request alone, and then another whose neighbour is taken away in the middle."""
    folder, prompt = checkpoints / "deepseek_v2", prompts()[2]
    with node_of(folder, ParallelConfig()) as alone:
        alone.add("0", prompt, NUM_TOKENS)
        run_until([alone], lambda: "0" in alone.ended)
        expected = alone.tokens["0"]
    with node_of(folder, DP2) as node:
        assert isinstance(node.core.scheduler, GroupScheduler)
        node.add("alone", prompt, NUM_TOKENS)
        run_until([node], lambda: "alone" in node.ended)
        node.add("goes on", prompt, NUM_TOKENS)
        node.add("is taken away", prompts()[0], NUM_TOKENS)
        run_until([node], lambda: len(node.tokens["is taken away"]) > 2)
        node.core.handle(AbortRequests(["is taken away"]))
        run_until([node], lambda: "goes on" in node.ended)
        assert node.tokens["alone"] == node.tokens["goes on"] == expected
        assert len(node.tokens["is taken away"]) < NUM_TOKENS
        node.check_empty()


NGRAMS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
)


@pytest.mark.parametrize("parallel", [DP2, ParallelConfig(data_parallel_size=2)])
def test_drafts_do_not_change_answers(parallel: ParallelConfig, checkpoints: Path) -> None:
    """Groups have different numbers of rows, each of which computes its drafts too."""
    folder = checkpoints / ("deepseek_v2" if parallel is DP2 else "mixtral")
    with node_of(folder, ParallelConfig()) as alone:
        expected = answers(alone)
    with node_of(folder, parallel, speculative=NGRAMS, decode_query_len=4) as groups:
        assert answers(groups) == expected
        assert isinstance(groups.core.scheduler, GroupScheduler)
        for group in groups.core.scheduler.groups:
            assert group.stats().drafts.num_accepted_tokens > 0


# Two nodes --------------------------------------------------------------------------------------


class Known:
    """Has what one rank alone has answered."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        return self._answers[tuple(prompt)][:count]


@pytest.fixture(scope="module")
def known(checkpoints: Path) -> Known:
    with node_of(checkpoints / "deepseek_v2", ParallelConfig()) as alone:
        asked = {str(index): prompt for index, prompt in enumerate(prompts())}
        for name, prompt in asked.items():
            alone.add(name, prompt, 24)
        run_until([alone], lambda: alone.ended.issuperset(asked))
        return Known({tuple(prompt): alone.tokens[name] for name, prompt in asked.items()})


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (ParallelConfig(data_parallel_size=2), ParallelConfig()),
        (DP2, ParallelConfig()),
        (ParallelConfig(tensor_parallel_size=2), DP2),
    ],
    ids=["DP 2 to 1", "DP 2 and EP 2 to 1", "TP 2 to DP 2"],
)
def test_nodes_of_different_layouts_hand_over(
    prefill: ParallelConfig, decode: ParallelConfig, known: Known, checkpoints: Path
) -> None:
    folder, nodes = checkpoints / "deepseek_v2", []
    with ExitStack() as stack:
        for role, parallel in (("kv_producer", prefill), ("kv_consumer", decode)):
            kv = KVTransferConfig(kv_role=role, num_streams=2)  # type: ignore[arg-type]
            nodes.append(stack.enter_context(node_of(folder, parallel, kv)))
        asked = {f"{turn}.{i}": prompt for turn in "ab" for i, prompt in enumerate(prompts())}
        hand_over(nodes[0], nodes[1], asked, known)
        assert nodes[1].core.stats().prompt_tokens_computed == 0
        assert nodes[1].core.stats().prompt_tokens_transferred > 0
        for node in nodes:
            if isinstance(scheduler := node.core.scheduler, GroupScheduler):
                assert all(group.stats().num_steps > 0 for group in scheduler.groups)


# KV from elsewhere ------------------------------------------------------------------------------


def long_prompts() -> list[list[int]]:
    return [prompt * 2 for prompt in prompts()[2:]]


def ask_all(node: GroupedNode, turn: str) -> None:
    """Asks one after the other, each once all blocks of the one before are stored."""
    for index, prompt in enumerate(long_prompts()):
        node.add(f"{turn}{index}", prompt, NUM_TOKENS)
        run_until([node], lambda: f"{turn}{index}" in node.ended)  # noqa: B023
        run_until([node], lambda: not node.core.connector.counters.get("live_transfers"))


def test_groups_have_host_memory_of_their_own(checkpoints: Path, tmp_path: Path) -> None:
    """The cache of a group has room for one long prompt; what it forgets comes back."""
    folder = checkpoints / "deepseek_v2"
    with node_of(folder, ParallelConfig()) as alone:
        ask_all(alone, "a")
        expected = list(alone.tokens.values())
    kv = KVTransferConfig(
        kv_role="kv_producer", host_tier_bytes=1 << 20, host_tier_path=str(tmp_path / "memory")
    )
    with node_of(folder, DP2, kv, cache=CacheConfig(block_size=16, num_blocks=12)) as node:
        scheduler = node.core.scheduler
        assert isinstance(scheduler, GroupScheduler)
        for turn in "abc":
            ask_all(node, turn)
            assert [node.tokens[f"{turn}{i}"] for i in range(len(expected))] == expected
        loaded = [group.stats().prompt_tokens_loaded for group in scheduler.groups]
        assert sum(loaded) > 0
        assert node.core.stats().prompt_tokens_loaded == sum(loaded)
        node.check_empty()
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.slots")}
    assert names == {"memory/rank0-0of1.slots", "memory/group1/rank0-0of1.slots"}


def test_prefixes_come_from_the_group_of_a_peer_that_has_them(checkpoints: Path) -> None:
    """The test plays both node servers. What the peer has is in its second group alone."""
    folder, prompt = checkpoints / "deepseek_v2", long_prompts()[1]
    kv = KVTransferConfig(kv_role="kv_producer", shares_prefixes=True, pulls_always=True)
    with ExitStack() as stack:
        holder, asker = (
            stack.enter_context(
                node_of(folder, DP2, kv, cache=CacheConfig(block_size=16, num_blocks=72))
            )
            for _ in range(2)
        )
        for name in ("in the first", "in the second"):
            holder.add(name, prompts()[0] if name == "in the first" else prompt, NUM_TOKENS)
        run_until([holder], lambda: len(holder.ended) == 2)
        asker.add("asks", prompt, NUM_TOKENS, prefix_peer="prefill/10.0.0.1:1")
        run_until([asker], lambda: asker.asks)
        group, transfer_id, count = holder.core.scheduler.remote.offer(asker.asks[0].chains)
        assert (group, count) == (1, len(prompt) // 16 * 16)
        peer = holder.core.connector.peer_info
        assert peer is not None
        params = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, peer=peer.group(group)
        )
        answer = PrefixAnswer("asks", asker.asks[0].number, params, count)
        asker.core.handle(answer)
        run_until([holder, asker], lambda: "asks" in asker.ended)
        assert asker.tokens["asks"] == holder.tokens["in the second"]
        assert asker.core.stats().prompt_tokens_pulled == count
        asker.core.handle(answer)  # Too late: it is let go.
        nodes = [holder, asker]
        run_until(nodes, lambda: not any(node.core.scheduler.check_empty() for node in nodes))
