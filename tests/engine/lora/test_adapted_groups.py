"""Adapters on data-parallel groups: each group has slots of its own, and all share host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.config import ParallelConfig
from engine.contracts.messages import AdapterAnswer
from engine.core.core import EngineCore
from engine.sched.groups.group_scheduler import GroupScheduler
from tests.engine.lora.adapted_engine import Adapted, request
from tests.engine.thread_executor import ThreadExecutor

TIMEOUT_S, PAUSE_S = 100.0, 0.0002
WHO = [0, None, 1, 2, 3, None, 4, 0, 1]
"""The adapter of each request, by number; None: the model itself."""


@dataclass
class Groups:
    """Two groups on this process's threads."""

    core: EngineCore
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    answers: dict[int, AdapterAnswer] = field(default_factory=dict)
    most_running: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def scheduler(self) -> GroupScheduler:
        assert isinstance(self.core.scheduler, GroupScheduler)
        return self.core.scheduler

    def until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if is_done():
                return
            time.sleep(PAUSE_S)  # Ranks are threads: they compute meanwhile.
            for output in self.core.step().outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason:
                    self.ends[output.request_id] = output.error or output.finish_reason
            self.answers |= {
                answer.call_id: answer for answer in self.core.adapters.ledger.take_answers()
            }
            for index, group in enumerate(self.scheduler.groups):
                running = group.stats().num_running
                self.most_running[index] = max(self.most_running[index], running)
        raise AssertionError("it does not come")


@contextmanager
def groups_of(models: Adapted, **lora: object) -> Iterator[Groups]:
    parallel = ParallelConfig(data_parallel_size=2)
    config = models.config(lora=models.lora(**lora), parallel=parallel)
    executor = ThreadExecutor(config)
    groups = Groups(EngineCore(config, executor, lambda *_: None))
    try:
        yield groups
        groups.until(lambda: groups.core.is_idle)
        groups.core.check_empty()
    finally:
        groups.core.shutdown()
        executor.shutdown()


def ask_all(groups: Groups, models: Adapted) -> None:
    """Asks all together, and compares with merged models."""
    messages = [request(f"r{i}", seed=i) for i in range(len(WHO))]
    for message, index in zip(messages, WHO, strict=True):
        groups.core.handle(models.with_adapter(message, index))
    groups.until(lambda: len(groups.ends) == len(WHO))
    for message, index in zip(messages, WHO, strict=True):
        assert groups.ends[message.request_id] == "length"
        assert groups.tokens[message.request_id] == models.expected(message, index), message


def test_groups_answer_as_merged_models_do(adapted_family: Callable[[str], Adapted]) -> None:
    """Each group has two slots, and all of them room for three adapters in host memory."""
    models = adapted_family("llama")
    with groups_of(models, max_loras=2, max_cpu_loras=3) as groups:
        ask_all(groups, models)
        assert min(groups.most_running) > 0
        stats = groups.core.stats().lora
        assert stats is not None and len(stats.loaded) == 3


def test_an_adapter_comes_and_goes_for_all_groups(
    adapted_family: Callable[[str], Adapted],
) -> None:
    models = adapted_family("llama")
    digest = models.refs[0].digest
    with groups_of(models, modules=(), max_loras=1, max_cpu_loras=1) as groups:
        groups.core.adapters.ledger.add(0, digest, str(models.path(0)))
        groups.until(lambda: 0 in groups.answers)
        assert groups.answers[0].error == ""
        messages = [request(f"r{i}", seed=2 * i) for i in range(2)]
        for message in messages:
            groups.core.handle(models.with_adapter(message, 0))
        groups.until(lambda: min(groups.most_running) > 0)
        groups.core.adapters.ledger.remove(1, digest)
        groups.core.handle(models.with_adapter(request("late", seed=2), 0))
        groups.until(lambda: len(groups.ends) == 3)
        assert "not loaded here" in groups.ends["late"]
        for message in messages:
            assert groups.tokens[message.request_id] == models.expected(message, 0)
        groups.until(lambda: 1 in groups.answers)
        groups.core.adapters.ledger.add(2, models.refs[1].digest, "/no/such/folder")
        groups.until(lambda: 2 in groups.answers)
        assert "/no/such/folder" in groups.answers[2].error
