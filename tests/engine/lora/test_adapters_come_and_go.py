"""Adapters that are loaded and unloaded while an engine runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.contracts.messages import AdapterAnswer, EngineCoreRequest
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from tests.engine.lora.adapted_engine import Adapted, request

UNKNOWN = "not loaded here"


class Core:
    """An engine core whose answers and outputs are kept."""

    def __init__(self, models: Adapted, **lora: int) -> None:
        config = models.config(lora=models.lora(modules=(), **lora))
        self.executor = UniprocExecutor(config)
        self.core = EngineCore(config, self.executor, lambda stage, fraction, total=0: None)
        self.answers: dict[int, AdapterAnswer] = {}
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}

    def add(self, message: EngineCoreRequest) -> None:
        self.tokens[message.request_id] = []
        self.core.handle(message)

    def step(self) -> None:
        for output in self.core.step().outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason:
                self.errors[output.request_id] = output.error
        self.answers |= {
            answer.call_id: answer for answer in self.core.adapters.ledger.take_answers()
        }

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100.0
        while time.monotonic() < deadline:
            if done():
                return
            self.step()
            time.sleep(0)  # A thread reads adapters.
        raise AssertionError("it does not come")

    def load(self, models: Adapted, index: int, path: Path | None = None) -> str:
        """Returns what was wrong; empty: nothing."""
        call = len(self.answers)
        self.core.adapters.ledger.add(
            call, models.refs[index].digest, str(path or models.path(index))
        )
        self.until(lambda: call in self.answers)
        return self.answers[call].error


@pytest.fixture
def models(adapted_family: Callable[[str], Adapted]) -> Adapted:
    return adapted_family("llama")


@pytest.fixture
def core(models: Adapted) -> Iterator[Core]:
    core = Core(models, max_loras=1, max_cpu_loras=2)
    yield core
    core.until(lambda: core.core.is_idle)
    core.core.check_empty()
    core.core.shutdown()
    core.executor.shutdown()


def test_a_loaded_adapter_answers_until_its_last_request_has_ended(
    core: Core, models: Adapted
) -> None:
    message = models.with_adapter(request("early", seed=2), 0)
    core.add(message)
    core.until(lambda: "early" in core.errors)
    assert UNKNOWN in core.errors["early"]
    assert core.load(models, 0) == ""
    core.add(models.with_adapter(request("running", seed=2), 0))
    core.until(lambda: len(core.tokens["running"]) > 2)
    core.core.adapters.ledger.remove(90, models.refs[0].digest)
    core.add(models.with_adapter(request("late", seed=2), 0))
    core.step()
    assert UNKNOWN in core.errors["late"]
    assert 90 not in core.answers and "running" not in core.errors
    core.until(lambda: 90 in core.answers)
    assert core.errors["running"] == ""
    assert core.tokens["running"] == models.expected(message, 0)


def test_what_ranks_cannot_read_is_refused_and_forgotten(
    core: Core, models: Adapted, tmp_path: Path
) -> None:
    assert "has changed since" in core.load(models, 0, models.path(1))
    assert "cannot be read" in core.load(models, 0, tmp_path)
    assert core.load(models, 0) == ""


def test_requests_of_an_adapter_that_vanished_end_and_others_go_on(
    core: Core, models: Adapted, tmp_path: Path
) -> None:
    shutil.copytree(models.path(0), tmp_path / "gone")
    assert core.load(models, 0, tmp_path / "gone") == ""
    for index in (1, 2):  # Host memory holds two: the first one goes.
        assert core.load(models, index) == ""
    shutil.rmtree(tmp_path / "gone")
    core.add(models.with_adapter(request("gone", seed=4), 0))
    core.add(models.with_adapter(request("there", seed=4), 1))
    core.until(lambda: {"gone", "there"} <= core.errors.keys())
    assert "cannot be read" in core.errors["gone"] and core.tokens["gone"] == []
    assert core.tokens["there"] == models.expected(request("there", seed=4), 1)


def test_one_name_with_other_weights_shares_no_kv(core: Core, models: Adapted) -> None:
    answers = []
    for index in (0, 1):
        assert core.load(models, index) == ""
        name = f"r{index}"
        core.add(models.with_adapter(request(name, seed=8), index))
        core.until(lambda name=name: name in core.errors)  # type: ignore[misc]
        answers.append(core.tokens[name])
        assert answers[-1] == models.expected(request(name, seed=8), index)
    assert answers[0] != answers[1]
    assert core.core.stats().prompt_tokens_cached == 0


def test_nobody_waits_for_ever_behind_an_adapter_that_everybody_wants(
    core: Core, models: Adapted
) -> None:
    for index in (0, 1):
        assert core.load(models, index) == ""
    number = 0
    core.add(models.with_adapter(request("first", seed=2), 0))
    core.step()
    core.add(models.with_adapter(request("other", seed=2), 1))
    core.add(request("plain", seed=2))
    while "other" not in core.errors:
        number += 1
        assert number < 200, "it is overtaken for ever"
        core.add(models.with_adapter(request(f"more-{number}", seed=2), 0))
        core.step()
    assert core.tokens["other"] == models.expected(request("other", seed=2), 1)
    assert "plain" in core.errors


def test_an_engine_that_changes_its_role_keeps_its_adapters(core: Core, models: Adapted) -> None:
    """Those in slots too: the row that a request left behind is another's then."""
    for index in (0, 1):
        assert core.load(models, index) == ""
    message = models.with_adapter(request("before", seed=2), 0)
    core.add(message)
    core.until(lambda: "before" in core.errors)
    expected = models.expected(message, 0)
    assert core.core.in_the_way() == [] and core.tokens["before"] == expected
    core.core.switch_role(replace(core.core.config, engine_id="adapted-again", epoch=2))
    core.add(models.with_adapter(request("after", seed=2), 0))
    core.add(other := models.with_adapter(request("other", seed=3), 1))
    core.until(lambda: {"after", "other"} <= core.errors.keys())
    assert core.tokens["after"] == expected
    assert core.tokens["other"] == models.expected(other, 1)


def test_an_adapter_on_its_way_is_in_the_way_of_a_change_of_roles(
    core: Core, models: Adapted
) -> None:
    core.core.adapters.ledger.add(1, models.refs[0].digest, str(models.path(0)))
    assert [one.split()[0] for one in core.core.in_the_way()] == ["adapter"]
    core.until(lambda: 1 in core.answers)
    assert core.core.in_the_way() == []


def test_calls_that_wait_are_answered_behind_a_change_of_roles(core: Core, models: Adapted) -> None:
    """It comes when its time is up, whatever is open: a removed adapter that is still in use, and
    one that is being read."""
    assert core.load(models, 0) == ""
    core.add(models.with_adapter(request("running", seed=2, max_tokens=60), 0))
    core.until(lambda: len(core.tokens["running"]) > 2)
    core.core.adapters.ledger.remove(90, models.refs[0].digest)
    core.core.adapters.ledger.add(91, models.refs[1].digest, str(models.path(1)))
    core.until(core.core.hold_steps)
    assert "running" not in core.errors and 90 not in core.answers
    core.core.switch_role(replace(core.core.config, engine_id="adapted-again", epoch=2))
    core.until(lambda: {90, 91} <= core.answers.keys())
    assert core.answers[91].error == ""
    core.add(models.with_adapter(request("late", seed=2), 0))
    core.add(other := models.with_adapter(request("other", seed=3), 1))
    core.until(lambda: {"late", "other"} <= core.errors.keys())
    assert UNKNOWN in core.errors["late"]
    assert core.tokens["other"] == models.expected(other, 1)
