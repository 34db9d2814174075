"""Data-parallel groups whose drafter has weights: they draft what one rank alone does, and answer
as it does, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.config import DeviceConfig, DrafterName, ParallelConfig, SpeculativeConfig
from engine.contracts.group_step import GroupStep
from engine.contracts.steps.step_launches import GraphKey
from engine.models.checkpoint import load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.parallel.token_exchange import GatherScatter
from engine.sched.rows.draft_length import DraftLength
from engine.worker.group_runner import GroupRunner
from engine.worker.model_runner import ModelRunner
from kv_transfer.config import KVTransferConfig
from tests.engine.kv_groups.grouped_node import GroupedNode, hand_over, run_until
from tests.engine.models.parity_cases import prompts
from tests.engine.models.test_data_parallel import DP2, Known, answers, config_of, node_of
from tests.engine.thread_executor import ThreadExecutor
from tests.engine.worker.drafts import draft_checkpoints as drafts
from tests.engine.worker.drafts.test_draft_graphs import ThreadGraphsByHand
from tests.engine.worker.drafts.test_network_drafters import watch

NUM_DRAFTS = 3
NUM_TOKENS = 24
Drafts = dict[tuple[int, ...], list[int]]
"""Maps known tokens to what is drafted behind them."""


def drafting(folder: Path, method: DrafterName, drafter: Path) -> dict[str, Any]:
    """Returns the fields of a configuration that drafts."""
    draft = read_draft(method, str(drafter), load_model_config(folder), NUM_DRAFTS)
    speculative = SpeculativeConfig(
        method=method,
        num_speculative_tokens=NUM_DRAFTS,
        prompt_lookup_max=3,
        prompt_lookup_min=2,
        draft=draft,
    )
    return {"speculative": speculative, "decode_query_len": NUM_DRAFTS + 1}


def runners(node: GroupedNode) -> list[ModelRunner]:
    assert isinstance(node.executor, ThreadExecutor)
    return [worker.runner for worker in node.executor.workers]


def drafted(found: Iterable[tuple[list[int], list[int], int]]) -> Drafts:
    """Returns the drafts that had a place and blocks."""
    return {tuple(known): proposed[:room] for known, proposed, room in found if room > 0}


def check_drafts(found: Drafts, expected: Drafts) -> None:
    """Checks what was drafted behind the same tokens, as far as both had blocks for it."""
    for tokens in found.keys() & expected.keys():
        count = min(len(found[tokens]), len(expected[tokens]))
        assert found[tokens][:count] == expected[tokens][:count]


class Alone(NamedTuple):
    """Holds what one rank makes of all prompts."""

    answers: dict[tuple[int, ...], list[int]]
    drafts: Drafts


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with latent attention, experts, and a layer for each of two drafts."""
    folder = tmp_path_factory.mktemp("mtp") / "model"
    drafts.write_with_mtp(folder, "deepseek_v3_yarn", 2)
    return folder


@pytest.fixture(scope="module")
def alone(with_mtp: Path) -> Alone:
    with node_of(with_mtp, ParallelConfig(), **drafting(with_mtp, "mtp", with_mtp)) as node:
        found = watch(runners(node)[0])
        for index, prompt in enumerate(prompts()):
            node.add(str(index), prompt, NUM_TOKENS)
        run_until([node], lambda: len(node.ended) == len(prompts()))
        known = {tuple(prompt): node.tokens[str(i)] for i, prompt in enumerate(prompts())}
    return Alone(known, drafted(found))


def test_groups_draft_as_one_rank_does(with_mtp: Path, alone: Alone) -> None:
    """Groups draft by a chain of layers with experts, while others compute the first chunks of a
    prompt, or nothing at all."""
    with node_of(with_mtp, DP2, **drafting(with_mtp, "mtp", with_mtp)) as groups:
        found = [watch(runner) for runner in runners(groups)]
        for index, prompt in enumerate(prompts()):
            groups.add(str(index), prompt, NUM_TOKENS)
            if index == 0:
                run_until([groups], lambda: len(groups.tokens["0"]) > 2)
        run_until([groups], lambda: len(groups.ended) == len(prompts()))
        for index, prompt in enumerate(prompts()):
            assert groups.tokens[str(index)] == alone.answers[tuple(prompt)]
        run_until([groups], lambda: not groups.core.scheduler.check_empty())
        assert isinstance(groups.executor, ThreadExecutor)
        steps = [step for step in groups.executor.steps if isinstance(step, GroupStep)]
    of_groups = [drafted(of_rank) for of_rank in found]
    assert all(len(of_group) > 10 for of_group in of_groups)
    both = of_groups[0] | of_groups[1]
    check_drafts(both, alone.drafts)
    assert len(both.keys() & alone.drafts.keys()) > 0.8 * len(alone.drafts)
    assert any(None in step.steps and step.num_sampled for step in steps), "one group drafts alone"


class GroupGraphsByHand(ThreadGraphsByHand):
    """Replays what a rank of a group would: as many rows as were recorded."""

    exchange: GatherScatter

    def replay(self, key: GraphKey) -> None:
        num_rows, self.exchange.num_rows = self.exchange.num_rows, None
        super().replay(key)
        self.exchange.num_rows = num_rows


def recorded(node: GroupedNode) -> list[GroupGraphsByHand]:
    """Records the graphs of all ranks and returns them."""
    executor = node.executor
    assert isinstance(executor, ThreadExecutor)
    executor._on_all(lambda worker: worker.runner.capture_model(lambda fraction: None))
    found = []
    for runner in runners(node):
        assert isinstance(runner, GroupRunner) and isinstance(runner._graphs, GroupGraphsByHand)
        runner._graphs.exchange = runner._exchange
        found.append(runner._graphs)
    return found


def test_groups_of_which_each_step_drafts_another_number(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups take the same number, and replay the same graphs, of steps and of passes. The
    drafter is the model itself, with slices of experts, so that all of its drafts are right."""
    rng = random.Random(3)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_rows: rng.choice(self.lengths))
    GroupGraphsByHand.patch(monkeypatch)
    folder = checkpoints / "mixtral"
    with node_of(folder, ParallelConfig()) as node:
        expected = answers(node)
    parallel, more = ParallelConfig(data_parallel_size=2), drafting(folder, "draft_model", folder)
    more["speculative"] = replace(more["speculative"], adaptive=True)
    with node_of(folder, parallel, **more) as groups:
        graphs = recorded(groups)
        assert answers(groups) == expected
        long = prompts()[3]
        groups.add("drafts", prompts()[1], 30)
        groups.add("computes", long[::-1], 2)
        run_until([groups], lambda: {"drafts", "computes"} <= groups.ended)
        groups.add("alone", long[1:], 2)
        run_until([groups], lambda: "alone" in groups.ended)
        stats = groups.core.stats().drafts
        assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens > 0
        assert isinstance(groups.executor, ThreadExecutor)
        steps = [step for step in groups.executor.steps if isinstance(step, GroupStep)]
    assert any(step.num_sampled == 0 for step in steps), "a chunk that is not the last, alone"
    assert {step.query_len for step in steps} == {1, 2, 4}
    assert {key.num_drafts for key in graphs[0].replayed} == {0, 1, 3}
    assert {key.width for key in graphs[0].replayed if key.decodes} == {1, 2, 4}
    assert graphs[0].replayed == graphs[1].replayed


def test_drafting_groups_hand_over(with_mtp: Path, alone: Alone) -> None:
    """The feature of the last token goes from a group of a prefill node, which drafts nothing, to
    the group that goes on, which drafts as one rank does that has computed the prompt itself."""
    more = drafting(with_mtp, "mtp", with_mtp)
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                node_of(
                    with_mtp,
                    DP2,
                    KVTransferConfig(kv_role=role, num_streams=2),
                    **{**more, "decode_query_len": query_len},
                )
            )
            for role, query_len in (("kv_producer", 1), ("kv_consumer", NUM_DRAFTS + 1))
        )
        found = [watch(runner) for runner in runners(decode)]
        asked = {str(index): prompt for index, prompt in enumerate(prompts()[1:4])}
        hand_over(prefill, decode, asked, Known(alone.answers))
    of_groups = [drafted(of_rank) for of_rank in found]
    for of_group in of_groups:
        check_drafts(of_group, alone.drafts)
        assert len(of_group.keys() & alone.drafts.keys()) > 3


@pytest.mark.multi_gpu
@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_gpus_draft_in_lock_step(method: DrafterName, with_mtp: Path, checkpoints: Path) -> None:
    """Steps and passes are recorded, and one group drafts while the other has nothing to do. The
    second model is the model itself, so that all of its drafts are right, however many there are.
    """
    is_mtp = method == "mtp"
    folder = with_mtp if is_mtp else checkpoints / "mixtral"
    more = drafting(folder, method, folder)
    more["speculative"] = replace(more["speculative"], adaptive=not is_mtp)
    found, accepted = [], []
    for parallel in (ParallelConfig(), DP2):
        config = config_of(folder, parallel, device=DeviceConfig(device="cuda"), **more)
        node = GroupedNode.start(config)
        try:
            of_all = answers(node)
            node.add("alone", prompts()[0], 30)
            run_until([node], lambda: "alone" in node.ended)  # noqa: B023
            found.append((of_all, node.tokens["alone"]))
            stats = node.core.stats().drafts
            accepted.append(stats.num_accepted_tokens / stats.num_draft_tokens)
        finally:
            node.shutdown()
    assert found[0] == found[1]
    if is_mtp:
        assert accepted[1] == pytest.approx(accepted[0], abs=0.02)
    else:
        assert min(accepted) > 0.8
