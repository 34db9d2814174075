"""Runs stages as threads of one process: what arrives, in which order, and how many bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from engine.parallel.distributed import ParallelGroup, meet
from engine.parallel.stage_link import StageLink, StageLostError
from tests.engine.models.conftest import free_ports

T = TypeVar("T")
NUM_STAGES, NUM_STEPS, HIDDEN = 3, 30, 16
ODD_HIDDEN = 17
_TIMEOUT_S = 60.0


def play(scene: Callable[[StageLink], T]) -> list[T]:
    """Returns what each stage returned. None leaves before all are done: what is on its way ends
    with a link."""
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    all_done = threading.Barrier(NUM_STAGES)

    def stage_of(stage: int) -> T:
        store = meet(stage, NUM_STAGES, rendezvous, timedelta(seconds=_TIMEOUT_S))
        own = PrefixStore("link", store)
        link = StageLink(stage, NUM_STAGES, "cpu", own, "127.0.0.1", _TIMEOUT_S)
        try:
            return scene(link)
        finally:
            all_done.wait(_TIMEOUT_S)
            link.close()
            link.close()

    with ThreadPoolExecutor(NUM_STAGES) as threads:
        return list(threads.map(stage_of, range(NUM_STAGES), timeout=_TIMEOUT_S))


def num_tokens_of(step: int) -> int:
    return 1 + 37 * step % 50


def run_steps(link: StageLink) -> list[list[int]]:
    """Each stage adds one; tokens that come back say what the last one saw. The first stage never
    waits, though the last one is slow to begin."""
    like = torch.empty(0, HIDDEN, dtype=torch.bfloat16)
    seen: list[list[int]] = []
    if link.is_last:
        time.sleep(0.2)
    for step in range(NUM_STEPS):
        count = num_tokens_of(step)
        x = torch.full((count, HIDDEN), float(step), dtype=torch.bfloat16)
        if not link.is_first:
            x = link.receive(count, like)
        if link.is_last:
            assert x.shape == (count, HIDDEN)
            link.give_back([int(x[0, 0]), count])
        else:
            link.send(x + 1)
    while not link.is_last and len(seen) < NUM_STEPS:
        tokens = link.take_tokens(wait=True)
        assert tokens is not None
        seen.append(tokens.tolist())
    if not link.is_last:
        assert link.take_tokens(wait=False) is None
    return seen


def test_steps_pass_all_stages_in_order() -> None:
    expected = [[step + 2, num_tokens_of(step)] for step in range(NUM_STEPS)]
    assert play(run_steps) == [expected, expected, []]


def lose_the_middle(link: StageLink) -> str:
    like = torch.empty(0, HIDDEN)
    if link.stage == 1:
        link.receive(3, like)
        link.close()
        return "left"
    if link.is_first:
        link.send(torch.ones(3, HIDDEN))
        return "sent"
    with pytest.raises(StageLostError, match="another stage of the pipeline is gone: stage 1"):
        link.receive(3, like)
    return "noticed"


def test_a_stage_that_leaves_is_noticed_by_the_one_that_waits_for_it() -> None:
    assert play(lose_the_middle) == ["sent", "left", "noticed"]


def numbers_of(step: int) -> torch.Tensor:
    """Returns what the first stage sends: no two numbers are alike."""
    count = num_tokens_of(step)
    return torch.arange(count * ODD_HIDDEN, dtype=torch.float32).view(count, ODD_HIDDEN) + step


def run_steps_by_parts(link: StageLink, group: ParallelGroup) -> int:
    """Returns how many bytes this rank has sent."""
    sent = 0
    post = link._outbox.send

    def counted(to: Any, x: torch.Tensor, stage: int) -> None:
        nonlocal sent
        sent += x.numel() * x.element_size()
        post(to, x, stage)

    link._outbox.send = counted  # type: ignore[method-assign]
    for step in range(NUM_STEPS):
        x = numbers_of(step)
        if not link.is_first:
            found = link.receive(len(x), torch.empty(0, ODD_HIDDEN))
            assert torch.equal(found, x + link.stage - 1), (step, group.rank)
            x = found
        if not link.is_last:
            link.send(x if link.is_first else x + 1)
    return sent


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_sends_its_part_alone(num_ranks: int) -> None:
    """Numbers of a step do not divide by the ranks."""
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    num_stages, all_done = 3, threading.Barrier(3 * num_ranks)

    def rank_of(number: int) -> int:
        stage, rank = divmod(number, num_ranks)
        timeout = timedelta(seconds=_TIMEOUT_S)
        store = meet(number, num_stages * num_ranks, rendezvous, timeout)
        own = PrefixStore(f"stage{stage}", store)
        with ParallelGroup(rank, num_ranks, address="127.0.0.1", store=own) as group:
            own = PrefixStore(f"pipeline{rank}", store)
            link = StageLink(stage, num_stages, "cpu", own, "127.0.0.1", _TIMEOUT_S, group)
            try:
                return run_steps_by_parts(link, group)
            finally:
                all_done.wait(_TIMEOUT_S)
                link.close()

    with ThreadPoolExecutor(num_stages * num_ranks) as threads:
        sent = list(threads.map(rank_of, range(num_stages * num_ranks), timeout=_TIMEOUT_S))
    steps = [numbers_of(step).numel() for step in range(NUM_STEPS)]
    assert any(size % num_ranks for size in steps)
    assert sent[: 2 * num_ranks] == [4 * sum(-(-size // num_ranks) for size in steps)] * (
        2 * num_ranks
    )
    assert sent[2 * num_ranks :] == [0] * num_ranks


def test_a_step_of_another_size_is_a_fault() -> None:
    def scene(link: StageLink) -> None:
        if link.is_first:
            link.send(torch.ones(3, HIDDEN))
        elif link.stage == 1:
            with pytest.raises(RuntimeError, match="waits for 64 numbers of a step and got 48"):
                link.receive(4, torch.empty(0, HIDDEN))

    play(scene)
