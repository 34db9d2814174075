"""The whole engine with real processes: streams, many at once, aborts, and nothing left."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import EngineCoreOutput, LoadProgress
from engine.contracts.reports.profiles import ProfileOptions, ProfileRefused
from engine.contracts.request_spec import RequestSpec
from engine.frontend import output_delivery
from engine.frontend.async_llm import AsyncLLM
from engine.inspection_config import InspectionConfig
from tests.engine.core.tiny_engine import (
    NUM_BLOCKS,
    Oracle,
    make_request,
    tiny_config,
    until,
    until_empty,
)
from tests.engine.core.trace_file import steps_of
from tests.processes import is_gone, stopped

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Letters:
    """Token id to a letter."""

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns where profiles go: a folder that the engine makes."""
    return tmp_path_factory.mktemp("profiles") / "made"


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[(1, False), (2, True)], ids=["tp1", "tp2-async"]
)
async def llm(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[AsyncLLM]:
    """Returns an engine whose core looks for leftovers whenever it is idle (a debug log level makes
    it do so), and dies when it finds some.
    """
    tp_size, async_scheduling = request.param
    inspection = InspectionConfig(torch_profiler_dir=str(folder))
    config = replace(tiny_config(tp_size, async_scheduling=async_scheduling), inspection=inspection)
    progress: list[LoadProgress] = []
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.DEBUG)
    llm = await AsyncLLM.start(config, progress.append, Letters())
    root.setLevel(level)
    assert {p.stage for p in progress} >= {"loading weights", "measuring memory"}
    assert len(llm.ready.worker_pids) == tp_size
    assert llm.ready.num_blocks == NUM_BLOCKS
    yield llm
    assert not llm.is_dead, llm.dead_reason
    await until_empty(llm)
    await llm.shutdown()
    await llm.shutdown()
    with pytest.raises(EngineDeadError):
        await llm.profiles.start(ProfileOptions())
    assert all(is_gone(pid) for pid in (llm.core_pid, *llm.ready.worker_pids))


async def _tokens(llm: AsyncLLM, request_id: str, seed: int) -> list[int]:
    return [
        token
        async for output in llm.generate(make_request(request_id, seed))
        for token in output.token_ids
    ]


async def test_stream(llm: AsyncLLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's token is an output of the engine core, and each of its messages is passed on at
    once. On a busy machine a message has several steps, whose tokens come together."""
    monkeypatch.setattr(output_delivery, "_SLICE_S", math.inf)
    messages: list[list[EngineCoreOutput]] = []
    take = llm._delivery.take

    def seen(outputs: Iterable[EngineCoreOutput], sent_at: float) -> None:
        messages.append([one for one in outputs if one.request_id == "stream"])
        take(outputs, sent_at)

    monkeypatch.setattr(llm._delivery, "take", seen)
    outputs = [output async for output in llm.generate(make_request("stream", 20))]
    assert [t for o in outputs for t in o.token_ids] == oracle.tokens(20)
    steps = [one for message in messages for one in message]
    assert len(steps) == len(oracle.tokens(20)), "tokens come one by one"
    firsts = [one for one in steps if one.num_cached_tokens is not None]
    later = [any(one.num_cached_tokens is None for one in message) for message in messages]
    assert len(outputs) == len(firsts) + sum(later), "and none waits for the next"
    assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert "".join(o.text for o in outputs) == Letters().decode(oracle.tokens(20))
    assert outputs[0].num_cached_tokens is not None
    assert outputs[1].num_cached_tokens is None
    await until_empty(llm)


async def test_fifty_at_once_equal_one_at_a_time(llm: AsyncLLM, oracle: Oracle) -> None:
    found = await asyncio.gather(*(_tokens(llm, f"many-{i}", i) for i in range(50)))
    for seed, tokens in enumerate(found):
        assert tokens == oracle.tokens(seed), seed
    await until_empty(llm)
    assert 0 < llm.stats.worker_host_s < 60


async def test_aborts_in_every_manner_leave_nothing(llm: AsyncLLM, oracle: Oracle) -> None:
    """The engine does not wait for its reader: it may have given the last token before it is told
    to abort. Then the answer is whole."""
    draw, max_tokens = random.Random(3), 40
    endings: list[str | None] = []

    async def one(index: int) -> None:
        request_id, manner = f"abort-{index}", index % 6
        stream = llm.generate(make_request(request_id, index, max_tokens=max_tokens))
        num_taken, num_tokens = draw.randrange(12), 0
        if manner == 0:
            return
        if manner == 1:
            task = asyncio.create_task(_drain(stream))
            await asyncio.sleep(0.003 * num_taken)
            task.cancel()
            return
        async for output in stream:
            num_taken -= 1
            num_tokens += len(output.token_ids)
            if num_taken <= 0 and manner == 2:
                await stream.aclose()
            elif num_taken <= 0 and manner == 3:
                llm.abort(request_id)
                rest = [output async for output in stream]
                num_tokens += sum(len(output.token_ids) for output in rest)
                endings.append(rest[-1].finish_reason)
                is_whole = num_tokens == max_tokens
                assert endings[-1] == ("length" if is_whole else "abort"), num_tokens
                return
            elif num_taken <= 0 and manner == 4:
                return
            assert output.token_ids

    async def _drain(stream: AsyncIterator[object]) -> None:
        async for _ in stream:
            pass

    await asyncio.gather(*(one(i) for i in range(60)))
    assert len(endings) == 10
    for index in range(63, 123, 6):
        if "abort" not in endings:
            await one(index)
    assert "abort" in endings
    await until_empty(llm)
    assert await _tokens(llm, "after", 8) == oracle.tokens(8)


async def test_stop_string_ends_the_request_in_the_engine(llm: AsyncLLM, oracle: Oracle) -> None:
    text = Letters().decode(oracle.tokens(22))
    stop = text[5:8]
    request = make_request("stop", 22, stop=(stop,))
    outputs = [output async for output in llm.generate(request)]
    assert "".join(o.text for o in outputs) == text[: text.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    await until_empty(llm)


async def test_request_that_never_fits_ends_with_the_reason(llm: AsyncLLM) -> None:
    request = make_request("too-long", 2)
    request.spec = RequestSpec([1] * 1000, request.spec.sampling)
    outputs = [output async for output in llm.generate(request)]
    assert outputs[-1].finish_reason == "error"
    assert "1000" in outputs[-1].error


async def test_request_ids_are_unique(llm: AsyncLLM) -> None:
    stream = llm.generate(make_request("twice", 4))
    with pytest.raises(ValueError, match="twice is in use"):
        llm.generate(make_request("twice", 4))
    await stream.aclose()
    assert [output async for output in stream] == []


async def test_prefix_cache_is_used_and_forgotten(llm: AsyncLLM, oracle: Oracle) -> None:
    async def cached(request_id: str) -> int | None:
        outputs = [output async for output in llm.generate(make_request(request_id, 7))]
        assert [t for o in outputs for t in o.token_ids] == oracle.tokens(7)
        return outputs[0].num_cached_tokens

    await until_empty(llm)
    assert await cached("cold") == 0
    assert await cached("warm") == 32
    await until_empty(llm)
    with stopped(llm.ready.worker_pids[0]):
        stream = llm.generate(make_request("holder", 6))
        await until(lambda: llm.stats.num_running > 0, "a step that does not end")
        assert not await llm.reset_prefix_cache(), "blocks are in use"
        await stream.aclose()
    await until_empty(llm)
    assert await cached("cold again") == 0


async def test_unknown_requests_are_left_alone(llm: AsyncLLM, oracle: Oracle) -> None:
    llm.abort("nobody")
    llm.prefill_locally("nobody")
    llm.supply_first_token("nobody", 1)
    result = await llm.wait_kv_result("nobody")
    assert not result.ok
    assert not result.retryable
    assert await _tokens(llm, "somebody", 10) == oracle.tokens(10)


async def test_interrupt_is_not_for_children(llm: AsyncLLM, oracle: Oracle) -> None:
    for pid in (llm.core_pid, *llm.ready.worker_pids):
        assert os.getpgid(pid) == pid, "a Ctrl-C in the terminal does not reach it"
        os.kill(pid, signal.SIGINT)
    assert await _tokens(llm, "undisturbed", 12) == oracle.tokens(12)


async def test_shutdown_fails_streams_at_once_and_leaves_no_process(oracle: Oracle) -> None:
    """Its worker does not answer: nobody waits for it."""
    llm = await AsyncLLM.start(tiny_config())
    with stopped(llm.ready.worker_pids[0]):
        stream = llm.generate(make_request("cut", 2))
        await until(lambda: llm.stats.num_running > 0, "a step that does not end")
        shutdown = asyncio.create_task(llm.shutdown())
        with pytest.raises(EngineDeadError, match="was shut down"):
            async for _ in stream:
                pass
    await shutdown
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate(make_request("late", 2))
    assert all(is_gone(pid) for pid in (llm.core_pid, *llm.ready.worker_pids))


# Profiles --------------------------------------------------------------------------------------


async def test_every_rank_records_the_steps_that_are_served_meanwhile(
    llm: AsyncLLM, oracle: Oracle, folder: Path
) -> None:
    await until_empty(llm)
    started = await llm.profiles.start(ProfileOptions(record_shapes=True))
    with pytest.raises(ProfileRefused, match="running") as refused:
        await llm.profiles.start(ProfileOptions())
    assert refused.value.code == "profile_running"
    assert await _tokens(llm, "recorded", 3) == oracle.tokens(3)
    ended = await llm.profiles.stop()
    assert (ended.name, ended.ended_by) == (started.name, "call")
    assert [trace.rank for trace in ended.traces] == list(range(len(llm.ready.worker_pids)))
    assert all(trace.host for trace in ended.traces)
    recorded = [steps_of(trace.path) for trace in ended.traces]
    assert all(steps == recorded[0] for steps in recorded)
    spec = make_request("", 3).spec
    num_prompt, num_new = len(spec.prompt_token_ids), spec.sampling.max_tokens
    assert [tokens for _, _, tokens in recorded[0]] == [num_prompt] + [1] * (num_new - 1)
    assert {rows for _, rows, _ in recorded[0]} == {1}
    numbers = [number for number, _, _ in recorded[0]]
    assert numbers == list(range(numbers[0], numbers[0] + num_new))
    assert sorted(folder.iterdir()) == sorted(Path(trace.path) for trace in ended.traces)


async def test_a_profile_ends_by_itself_though_its_caller_has_gone(
    llm: AsyncLLM, oracle: Oracle
) -> None:
    asked = asyncio.create_task(llm.profiles.start(ProfileOptions(num_steps=4)))
    await asyncio.sleep(0)
    asked.cancel()
    for seed in (1, 2, 5):
        assert await _tokens(llm, f"beside-{seed}", seed) == oracle.tokens(seed)
    ended = await llm.profiles.stop()
    assert ended.ended_by == "steps"
    assert [len(steps_of(trace.path)) for trace in ended.traces] == [4] * len(ended.traces)


async def test_a_profile_of_an_idle_engine_ends_in_time(llm: AsyncLLM) -> None:
    await llm.profiles.start(ProfileOptions(seconds=0.1))
    refusal = "profile_running"
    async with asyncio.timeout(60):
        while refusal == "profile_running":
            with pytest.raises(ProfileRefused) as refused:
                await llm.profiles.start(ProfileOptions(num_steps=100_000))
            refusal = refused.value.code
    assert refusal == "invalid_value"
    assert (await llm.profiles.stop()).ended_by == "seconds"


async def test_a_folder_that_takes_no_profile_is_named(llm: AsyncLLM, folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")
    with pytest.raises(ProfileRefused, match=r"rank 0: FileExistsError") as refused:
        await llm.profiles.start(ProfileOptions())
    assert refused.value.code == "profile_failed"
    folder.unlink()
