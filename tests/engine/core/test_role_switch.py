"""Engines that change their role: workers stay, tokens are the same, nothing of before is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.contracts.errors import RoleSwitchRefused
from engine.contracts.messages import SwitchRole
from engine.core.role_session import RoleSession
from tests.engine.core.pd_pair import Pair, other_role, start_engine, start_engines, tokens_of
from tests.engine.core.tiny_engine import Oracle, make_request, tiny_config, until, until_empty
from tests.processes import stopped

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_S = 60.0


async def swap(pair: Pair, empty_within_s: float = LONG_S) -> None:
    engines = pair.prefill, pair.decode
    switches = (one.switch_role(other_role(one.config), None, empty_within_s) for one in engines)
    await asyncio.gather(*switches)
    pair.decode, pair.prefill = engines


async def run(pair: Pair, oracle: Oracle, seeds: range) -> None:
    """Runs requests side by side; every answer is the one of a single engine."""

    async def one(seed: int) -> None:
        export, pull = pair.request(seed)
        stream = pair.decode.generate(pull)
        prefill = asyncio.create_task(pair.run_prefill(export))
        assert await tokens_of(stream) == oracle.tokens(seed), seed
        assert (await prefill).ok

    await asyncio.gather(*(one(seed) for seed in seeds))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    """Both look for leftovers whenever they are idle, and die when they find some."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.DEBUG)
    pair = Pair(*await start_engines(start_engine("prefill"), start_engine("decode")))
    root.setLevel(level)
    yield pair
    for llm in (pair.prefill, pair.decode):
        assert not llm.is_dead, llm.dead_reason
        await until_empty(llm)
        await llm.shutdown()


async def test_engines_change_places_when_what_runs_has_ended(pair: Pair, oracle: Oracle) -> None:
    engines = [pair.prefill, pair.decode]
    workers = [llm.ready.worker_pids for llm in engines]
    movers = [llm.ready.transfer_pids for llm in engines]
    epochs = {llm.config.epoch for llm in engines}
    await run(pair, oracle, range(10, 14))
    streams = {seed: pair.decode.generate(make_request(f"long-{seed}", seed)) for seed in (42, 43)}
    reading = [asyncio.create_task(tokens_of(stream)) for stream in streams.values()]
    await swap(pair)
    assert [await one for one in reading] == [oracle.tokens(seed) for seed in streams]
    assert [llm.ready.worker_pids for llm in engines] == workers
    for llm, old in zip(engines, movers, strict=True):
        assert set(llm.ready.transfer_pids).isdisjoint(old)
        assert llm.ready.peer is not None and llm.ready.peer.epoch not in epochs
    await run(pair, oracle, range(20, 24))


async def test_what_never_ends_is_given_up(pair: Pair, oracle: Oracle) -> None:
    """A request in the middle of its answer, and KV that nobody fetches. Where the engine was so
    much ahead of its reader that it had given the whole answer, another one is tried."""
    for attempt in range(10):
        export, _ = pair.request(50 + 100 * attempt)
        kept = pair.prefill.generate(export)
        assert len(await tokens_of(kept)) == 1
        running = pair.decode.generate(make_request(f"endless-{attempt}", 51, max_tokens=80))
        first = await anext(running)
        assert not first.finished
        await swap(pair, empty_within_s=0.0)
        left = [output async for output in running]
        result = await pair.decode.wait_kv_result(export.request_id)
        assert not result.ok
        if left[-1].finish_reason == "abort":
            break
        assert left[-1].finish_reason == "length"
    else:
        pytest.fail("a switch that may wait for nothing waited for every answer")
    assert sum(len(output.token_ids) for output in left) < 79
    for llm in (pair.prefill, pair.decode):
        await until(lambda: llm.stats.num_running == 0, "no running requests")  # noqa: B023
    await run(pair, oracle, range(52, 56))


async def test_a_second_switch_is_refused_and_changes_nothing(pair: Pair, oracle: Oracle) -> None:
    llm = pair.decode
    config = other_role(llm.config)
    with stopped(llm.ready.worker_pids[0]):
        reading = asyncio.create_task(tokens_of(llm.generate(make_request("under-way", 61))))
        first = asyncio.create_task(llm.switch_role(config, None, LONG_S))
        await asyncio.sleep(0)
        with pytest.raises(RoleSwitchRefused, match="already"):
            await llm.switch_role(other_role(llm.config), None, LONG_S)
    assert await reading == oracle.tokens(61)
    await first
    assert llm.config == config


async def test_no_memory_of_a_former_role_stays_mapped() -> None:
    llm = await start_engine("prefill", host_tier_bytes=1 << 20)

    def num_mapped() -> int:
        return Path(f"/proc/{llm.core_pid}/maps").read_text().count("memfd:")

    try:
        before = num_mapped()
        for _ in range(2):
            await llm.switch_role(other_role(llm.config), None, LONG_S)
        assert num_mapped() == before
    finally:
        await llm.shutdown()


class FakeCore:
    """Answers what a `RoleSession` asks of the engine core."""

    def __init__(self) -> None:
        self.left = ["1 transfers"]
        self.has_steps = True
        self.holds = False
        self.engines: list[EngineConfig] = []

    def in_the_way(self) -> list[str]:
        return self.left

    def hold_steps(self) -> bool:
        self.holds = True
        return not self.has_steps

    def switch_role(self, config: EngineConfig) -> None:
        self.engines.append(config)


async def test_states_by_hand() -> None:
    core, now = FakeCore(), 100.0
    session = RoleSession(core, clock=lambda: now)
    engine = tiny_config()
    assert not session.is_due()
    assert session.ask(SwitchRole(call_id=1, engine=engine, empty_within_s=5.0)) is None
    refusal = session.ask(SwitchRole(call_id=2, engine=engine, empty_within_s=5.0))
    assert refusal is not None and refusal.call_id == 2 and refusal.ready is None
    assert not session.is_due() and not core.holds and session.deadline < now + 1
    now = 104.9
    assert not session.is_due() and not core.holds
    now = 105.0
    assert not session.is_due() and core.holds, "the time is up, but a step is on its way"
    core.has_steps = False
    assert session.is_due()
    assert session.switch() == 1 and core.engines == [engine]
    assert not session.is_due() and session.deadline == float("inf")
    core.left = []
    assert session.ask(SwitchRole(call_id=3, engine=engine, empty_within_s=5.0)) is None
    assert session.is_due()
