"""The ledger of calls to an engine: each ends, by its answer, its deadline, or the engine's end."""

from __future__ import annotations

import asyncio

import pytest

from engine.contracts.errors import EngineCallTimeout, EngineDeadError
from engine.contracts.messages import (
    PrefixCacheReset,
    ResetPrefixCache,
    StartProfile,
    SwitchRole,
    ToEngineCore,
)
from engine.contracts.reports.profiles import ProfileOptions
from engine.frontend.calls.engine_calls import EngineCalls
from engine.frontend.calls.profile_calls import ProfileCalls
from engine.frontend.calls.role_calls import RoleCalls
from tests.engine.sched.factories import make_config


def reset(calls: EngineCalls, timeout_s: float = 60.0) -> asyncio.Task[PrefixCacheReset]:
    call = ResetPrefixCache(calls.next_id())
    return asyncio.create_task(calls.ask(call, PrefixCacheReset, timeout_s))


async def test_answers_find_their_calls_in_any_order() -> None:
    sent: list[ToEngineCore] = []
    calls = EngineCalls(sent.append)
    tasks = [reset(calls) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(calls.leftovers()) == 3
    for call_id in (3, 1, 2, 1, 99):
        calls.on_answer(PrefixCacheReset(call_id, ok=call_id == 2))
    assert [(await task).ok for task in tasks] == [False, True, False]
    assert calls.leftovers() == []


async def test_a_call_without_an_answer_ends_with_its_time() -> None:
    calls = EngineCalls(lambda call: None)
    with pytest.raises(EngineCallTimeout, match="ResetPrefixCache within 0 s"):
        await reset(calls, timeout_s=0.01)
    assert calls.leftovers() == []
    calls.on_answer(PrefixCacheReset(1, ok=True))


async def test_an_answer_that_came_in_time_counts_after_a_standstill() -> None:
    calls = EngineCalls(lambda call: calls.on_answer(PrefixCacheReset(1, ok=True)))
    assert (await reset(calls, timeout_s=0.0)).ok


async def test_calls_end_with_the_engine_and_with_their_callers() -> None:
    calls = EngineCalls(lambda call: None)
    gone, waits = reset(calls), reset(calls)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    assert calls.leftovers() == ["ResetPrefixCache"]
    calls.on_dead("worker 1 was killed")
    for task in (waits, reset(calls)):
        with pytest.raises(EngineDeadError, match="worker 1 was killed"):
            await task
    assert calls.leftovers() == []


async def test_every_kind_of_call_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose role is unknown is dead; one whose profile has no answer is not."""
    sent: list[ToEngineCore] = []
    given_up: list[str] = []
    calls = EngineCalls(sent.append)
    for limit in (
        "profile_calls._START_TIMEOUT_S",
        "profile_calls.STOP_LIMIT_S",
        "role_calls._SWITCH_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"engine.frontend.calls.{limit}", 0.01)
    profiles, roles = ProfileCalls(calls), RoleCalls(calls, given_up.append)
    for call in (profiles.start(ProfileOptions()), profiles.stop()):
        with pytest.raises(EngineCallTimeout):
            await call
    assert given_up == []
    with pytest.raises(EngineDeadError):
        await roles.switch(make_config(), 0.0)
    assert len(given_up) == 1 and calls.leftovers() == []
    assert isinstance(sent[0], StartProfile) and isinstance(sent[-1], SwitchRole)
