"""Calls about adapters, as a node follows them: only newer ones change anything."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge.adapter_call import LOAD_LIMIT_S, MAX_VERSION, AdapterCall
from engine.contracts.errors import EngineCallTimeout, InvalidRequest
from engine.frontend.calls import adapter_calls
from engine.frontend.calls.adapter_calls import OutdatedCall
from engine.frontend.calls.adapter_records import AdapterRecords
from engine.frontend.calls.engine_calls import EngineCalls
from engine.models.adapters.adapter_files import AdapterFiles, read_adapter
from engine.node.services.adapter_servicer import adapter_call
from tests.engine.frontend.still_adapters import StillAdapters
from tests.engine.lora.adapted_engine import Adapted


@pytest.fixture
def models(adapted_family: Callable[[str], Adapted]) -> Adapted:
    return adapted_family("llama")


@pytest.fixture
def adapters(models: Adapted) -> StillAdapters:
    lora = models.lora(modules=models.lora().modules[:1], folder=str(models.folder))
    return StillAdapters(models.config(lora=lora))


def told(adapters: StillAdapters) -> list[str]:
    return [type(call).__name__ for call in adapters.told]


async def test_an_older_call_changes_nothing_and_the_same_one_is_followed_once(
    adapters: StillAdapters, models: Adapted
) -> None:
    first, second = models.refs[1].digest, models.refs[2].digest
    for _ in range(2):
        ref = await adapters.load("poet", "adapter-1", in_place=True, version=10)
        assert ref.digest == first
    assert told(adapters) == ["AddAdapter"]
    with pytest.raises(OutdatedCall):
        await adapters.load("poet", "adapter-2", in_place=True, version=9)
    with pytest.raises(OutdatedCall):
        await adapters.unload("poet", 10)
    await adapters.unload("poet", 11)
    with pytest.raises(OutdatedCall):
        await adapters.load("poet", "adapter-2", in_place=True, version=10)
    assert "poet" not in adapters.known
    with pytest.raises(KeyError):
        await adapters.unload("poet", 11)
    await adapters.load("poet", "adapter-2", version=12)
    assert adapters.known["poet"].digest == second
    assert told(adapters) == ["AddAdapter", "RemoveAdapter", "AddAdapter"]


async def test_all_nodes_choose_the_same_of_two_calls_at_once(models: Adapted) -> None:
    ends = set()
    for order in ((1, 2), (2, 1)):
        lora = models.lora(modules=(), folder=str(models.folder))
        node = StillAdapters(models.config(lora=lora))
        for index in order:
            try:
                await node.load("poet", f"adapter-{index}", in_place=True, version=10)
            except OutdatedCall:
                assert node.known["poet"].digest == max(models.refs[i].digest for i in order)
        ends.add(node.known["poet"].digest)
    assert ends == {max(models.refs[1].digest, models.refs[2].digest)}


async def test_other_files_than_on_other_nodes_are_refused(
    adapters: StillAdapters, models: Adapted
) -> None:
    with pytest.raises(InvalidRequest, match="give all nodes the same files"):
        await adapters.load("poet", "adapter-1", version=10, digest=models.refs[2].digest)
    assert adapters.told == [] and adapters.records.of("poet") is None


async def test_what_many_routers_ask_for_is_read_once(
    adapters: StillAdapters, models: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asks every node that has missed a call: twenty would have it hash its files as often."""
    num_read = 0

    def read(folder: Path, max_rank: int) -> AdapterFiles:
        nonlocal num_read
        num_read += 1
        return read_adapter(folder, max_rank)

    monkeypatch.setattr(adapter_calls, "read_adapter", read)
    digest = models.refs[1].digest
    for _ in range(20):
        ref = await adapters.load("poet", "adapter-1", in_place=True, version=10, digest=digest)
        assert ref.digest == digest
    assert num_read == 1 and told(adapters) == ["AddAdapter"]


async def test_files_that_are_never_read_to_the_end_leave_threads_for_prompts(
    adapters: StillAdapters, models: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers ask again and again, and each reading hangs on the file server."""
    is_back = threading.Event()

    def read(folder: Path, max_rank: int) -> AdapterFiles:
        assert is_back.wait(60)
        return read_adapter(folder, max_rank)

    monkeypatch.setattr(adapter_calls, "read_adapter", read)
    most_threads = 4 + (os.cpu_count() or 1)
    try:
        with monkeypatch.context() as hurried:
            hurried.setattr(adapter_calls, "LOAD_LIMIT_S", 0.01)
            for _ in range(min(32, most_threads)):
                with pytest.raises(EngineCallTimeout, match="reading the adapter's files"):
                    await adapters.load("poet", "adapter-1", in_place=True, version=10)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(threading.active_count)
        assert adapters.told == [] and "poet" not in adapters.known
    finally:
        is_back.set()
    await adapters.load("poet", "adapter-1", in_place=True, version=10)
    assert adapters.known["poet"].digest == models.refs[1].digest


async def test_the_engine_has_the_time_that_reading_files_leaves(
    adapters: StillAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float] = []
    ask = EngineCalls.ask

    async def noted(calls: EngineCalls, call: Any, answer: Any, limit_s: float) -> Any:
        limits_s.append(limit_s)
        return await ask(calls, call, answer, limit_s)

    monkeypatch.setattr(EngineCalls, "ask", noted)
    await adapters.load("poet", "adapter-1")
    assert len(limits_s) == 1 and 0.0 < limits_s[0] < LOAD_LIMIT_S


async def test_a_name_goes_back_to_what_the_settings_say(
    adapters: StillAdapters, models: Adapted
) -> None:
    name, digest = models.refs[0].name, models.refs[0].digest
    await adapters.load(name, "adapter-1", in_place=True, version=10)
    assert adapters.known[name].digest == models.refs[1].digest
    await adapters.load(name, "", in_place=True, version=11, digest=digest)
    assert adapters.known[name].digest == digest
    with pytest.raises(InvalidRequest):
        await adapters.load("poet", "", version=11, digest=digest)


async def test_an_unloaded_name_is_remembered_where_it_never_was(
    adapters: StillAdapters,
) -> None:
    for _ in range(2):
        with pytest.raises(KeyError):
            await adapters.unload("poet", 10)
    with pytest.raises(OutdatedCall):
        await adapters.load("poet", "adapter-1", version=9)
    with pytest.raises(KeyError):
        await adapters.unload("bard")
    assert adapters.records.of("bard") is None


async def test_calls_that_are_made_here_are_the_newest(
    adapters: StillAdapters, models: Adapted
) -> None:
    future = 1 << 60
    await adapters.load("poet", "adapter-1", version=future)
    await adapters.load("poet", "adapter-2", in_place=True)
    known = adapters.records.of("poet")
    assert known == AdapterCall("poet", models.refs[2].digest, "adapter-2", future + 1)
    assert known.digest == read_adapter(models.path(2), 16).digest
    await adapters.unload("poet")
    assert adapters.records.of("poet") == AdapterCall("poet", "", "", future + 2)


async def until_told(adapters: StillAdapters, count: int) -> None:
    async with asyncio.timeout(60):
        while len(adapters.told) < count:
            await asyncio.sleep(0.001)


async def test_a_name_is_taken_away_while_another_adapter_is_read(
    adapters: StillAdapters,
) -> None:
    await adapters.load("bard", "adapter-2")
    adapters.hold()
    loads = [asyncio.create_task(adapters.load(name, "adapter-1")) for name in ("poet", "muse")]
    await until_told(adapters, 2)
    async with asyncio.timeout(60):
        await adapters.unload("bard")
    assert told(adapters) == ["AddAdapter", "AddAdapter", "RemoveAdapter"]
    adapters.release()
    await asyncio.gather(*loads)
    assert {"poet", "muse"} <= adapters.known.keys() and "bard" not in adapters.known


async def test_a_load_waits_for_no_request_of_what_the_name_stood_for(
    adapters: StillAdapters, models: Adapted
) -> None:
    """Routers wait two minutes for it, and take it back then; an answer may take longer."""
    await adapters.load("poet", "adapter-1")
    adapters.forgets = False
    async with asyncio.timeout(60):
        ref = await adapters.load("poet", "adapter-2", in_place=True)
    assert ref.digest == models.refs[2].digest == adapters.known["poet"].digest
    assert told(adapters) == ["AddAdapter", "AddAdapter", "RemoveAdapter"]


async def test_calls_about_one_name_come_one_after_the_other(adapters: StillAdapters) -> None:
    adapters.hold()
    load = asyncio.create_task(adapters.load("poet", "adapter-1", version=10))
    await until_told(adapters, 1)
    unload = asyncio.create_task(adapters.unload("poet", 11))
    adapters.release()
    await asyncio.gather(load, unload)
    assert told(adapters) == ["AddAdapter", "RemoveAdapter"] and "poet" not in adapters.known


@pytest.mark.parametrize("error", ["", "it is damaged"])
async def test_weights_stay_while_another_name_for_them_is_made(
    adapters: StillAdapters, error: str
) -> None:
    """They go if there will be none."""
    await adapters.load("bard", "adapter-1")
    adapters.hold()
    load = asyncio.create_task(adapters.load("poet", "adapter-1"))
    await until_told(adapters, 2)
    await adapters.unload("bard")
    assert told(adapters) == ["AddAdapter"] * 2
    adapters.release(error)
    if error:
        with pytest.raises(InvalidRequest, match=error):
            await load
    else:
        assert (await load).name == "poet"
    assert told(adapters)[2:] == (["RemoveAdapter"] if error else [])


@pytest.mark.parametrize("version", [1 << 63, (1 << 64) - 1])
async def test_a_call_that_none_could_follow_is_refused(
    adapters: StillAdapters, version: int
) -> None:
    """The next version would fit into no message, and the node would tell routers nothing more."""
    with pytest.raises(InvalidRequest, match="version"):
        await adapters.load("poet", "adapter-1", version=version)
    with pytest.raises(InvalidRequest, match="version"):
        await adapters.unload("poet", version)
    for name, model in (("n" * 513, ""), ("poet", "m" * 513)):
        with pytest.raises(InvalidRequest, match="name"):
            await adapters.unload(name, 10, model)
    assert adapters.records.of("poet") is None
    await adapters.load("poet", "adapter-1", version=MAX_VERSION)
    await adapters.unload("poet")
    record = adapters.records.of("poet")
    assert record is not None and adapter_call(record).version == MAX_VERSION + 1


def test_reports_tell_each_call_once_and_not_too_many_at_a_time() -> None:
    records = AdapterRecords()
    for i in range(1000):
        records.note(AdapterCall(f"n{i}", "d", "p", i))
    assert len(records.since(0)[0]) == 1000, "those of usual names come at once"
    for i in range(1000):
        records.note(AdapterCall(f"n{i}", "d" * 64, "p" * 900, i))
    records.note(AdapterCall("n0", "", "", 2000))
    seen: list[str] = []
    number = 0
    while True:
        new, number = records.since(number)
        if not new:
            break
        assert sum(adapter_call(one).ByteSize() for one in new) < 270_000
        seen += [one.name for one in new]
    assert seen == [*(f"n{i}" for i in range(1, 1000)), "n0"]
    records.note(AdapterCall("n7", "", "", 2001))
    assert [one.name for one in records.since(number)[0]] == ["n7"]
    for i in range(3000):
        records.note(AdapterCall(f"g{i}", "", "", i))
    assert records.of("g0") is None and records.of("g2999") and records.of("n9")
