"""AsyncLLM alone: what it tells the engine core, and what streams make of the answers."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
import pytest

from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    KVTransferResult,
    PrefillLocally,
    PrefixCacheReset,
    ResetPrefixCache,
    RetryRemotePrefill,
    SupplyFirstToken,
)
from engine.contracts.outputs import SchedulerStats, TokenLogprobs
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.request_stream import RequestStream
from kv_transfer.metadata import KVTransferParams
from tests.engine.core.tiny_engine import make_request
from tests.engine.frontend.fake_core import FakeCore

PULL = KVTransferParams(do_remote_prefill=True, transfer_id="00" * 16)
EXPORT = KVTransferParams(do_remote_decode=True, transfer_id="11" * 16)


def _generate(
    llm: AsyncLLM, params: KVTransferParams | None = None, **sampling: Any
) -> RequestStream:
    request = make_request("r", 2, **sampling)
    request.kv_transfer_params = params
    return llm.generate(request)


async def test_request_reaches_the_core_before_anybody_iterates(
    llm: AsyncLLM, core: FakeCore
) -> None:
    stream = _generate(llm, PULL)
    (message,) = core.take()
    assert isinstance(message, EngineCoreRequest)
    assert message.spec == make_request("r", 2).spec
    assert message.kv_transfer_params == PULL
    stream.close()
    assert core.take() == [AbortRequests(["r"])]


async def test_stream_that_is_forgotten_is_aborted(llm: AsyncLLM, core: FakeCore) -> None:
    async def break_off() -> None:
        async for _ in _generate(llm):
            break

    task = asyncio.create_task(break_off())
    await asyncio.sleep(0)
    core.take()
    core.tokens("r", [1])
    await task
    gc.collect()
    assert core.take() == [AbortRequests(["r"])]


async def test_late_close_does_not_hit_the_next_owner_of_an_id(
    llm: AsyncLLM, core: FakeCore
) -> None:
    first = _generate(llm)
    core.tokens("r", [1], "stop")
    second = _generate(llm)
    core.take()
    first.close()
    assert core.take() == []
    core.tokens("r", [2], "stop")
    assert [output.token_ids async for output in second] == [[2]]


async def test_first_token_is_given_once_and_at_once(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm, PULL)
    core.take()
    logprobs = TokenLogprobs([5], [-0.5], 1)
    llm.supply_first_token("r", 5, logprobs)
    llm.supply_first_token("r", 6, logprobs)
    assert core.take() == [SupplyFirstToken("r", 5)]
    output = await anext(stream)
    assert (output.token_ids, output.logprobs, output.finished) == ([5], [logprobs], False)
    core.tokens("r", [7], "length")
    assert [output.token_ids async for output in stream] == [[7]]
    assert core.take() == []


async def test_first_token_after_one_of_our_own_is_ignored(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm, PULL)
    core.tokens("r", [7])
    core.take()
    llm.supply_first_token("r", 5)
    assert core.take() == []
    assert (await anext(stream)).token_ids == [7]


async def test_first_token_that_crosses_our_own_is_given_once(
    llm: AsyncLLM, core: FakeCore
) -> None:
    """The prompt is computed here as well, and the core's first token was on its way."""
    stream = _generate(llm, PULL)
    llm.supply_first_token("r", 5)
    logprobs = [TokenLogprobs([5], [-0.5], 1)]
    own = EngineCoreOutput("r", [5], num_cached_tokens=8, logprobs=logprobs)
    core.say(EngineCoreOutputs(outputs=[own]))
    core.tokens("r", [6], "length")
    outputs = [output async for output in stream]
    assert [output.token_ids for output in outputs] == [[5], [], [6]]
    assert outputs[1].num_cached_tokens == 8
    assert not outputs[1].logprobs


async def test_first_output_behind_a_supplied_token_is_kept(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm, PULL)
    llm.supply_first_token("r", 5)
    second = EngineCoreOutput("r", [6], num_cached_tokens=0, num_output_tokens_before=1)
    core.say(EngineCoreOutputs(outputs=[second]))
    core.tokens("r", [7], "length")
    assert [output.token_ids async for output in stream] == [[5], [6], [7]]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [({"max_tokens": 1}, "length"), ({"stop_token_ids": (5,)}, "stop")],
)
async def test_first_token_that_is_the_last(
    llm: AsyncLLM, core: FakeCore, sampling: dict[str, Any], reason: str
) -> None:
    stream = _generate(llm, PULL, **sampling)
    waiting = asyncio.create_task(llm.wait_kv_result("r"))
    await asyncio.sleep(0)
    core.take()
    llm.supply_first_token("r", 5)
    assert core.take() == [AbortRequests(["r"])]
    assert [output.finish_reason async for output in stream] == [reason]
    assert not (await waiting).ok


async def test_only_token_does_not_concern_the_core(llm: AsyncLLM, core: FakeCore) -> None:
    params = msgspec.structs.replace(PULL, first_token_only=True)
    stream = _generate(llm, params, max_tokens=1)
    llm.retry_remote("r", params)
    assert not llm.supply_first_token("r", 5), "it was the last"
    assert [output.token_ids async for output in stream] == [[5]]
    _generate(llm, params, max_tokens=1).close()
    assert core.take() == []


async def test_only_token_is_computed_here_after_all(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm, msgspec.structs.replace(PULL, first_token_only=True), max_tokens=1)
    llm.prefill_locally("r")
    (message,) = core.take()
    assert isinstance(message, EngineCoreRequest) and message.kv_transfer_params is None
    stream.close()
    assert core.take() == [AbortRequests(["r"])]


async def test_results_of_attempts_and_what_follows_from_them(
    llm: AsyncLLM, core: FakeCore
) -> None:
    stream = _generate(llm, PULL)
    core.take()
    failed = KVTransferResult("r", 0, ok=False, reason="lost")
    core.say(EngineCoreOutputs(kv_results=[failed]))
    assert await llm.wait_kv_result("r") == failed
    llm.retry_remote("r", PULL)
    llm.prefill_locally("r")
    assert core.take() == [RetryRemotePrefill("r", PULL), PrefillLocally("r")]
    stream.close()
    assert (await llm.wait_kv_result("r")).reason == "the request has ended"


async def test_result_of_an_export_outlives_the_stream(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm, EXPORT)
    core.tokens("r", [5], "length")
    assert [output.token_ids async for output in stream] == [[5]]
    waiting = asyncio.create_task(llm.wait_kv_result("r"))
    await asyncio.sleep(0)
    assert not waiting.done()
    taken = KVTransferResult("r", 0, ok=True)
    core.say(EngineCoreOutputs(kv_results=[taken]))
    assert await waiting == taken


async def test_export_is_called_off_after_the_stream(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm, EXPORT)
    core.tokens("r", [5], "length")
    assert [output.token_ids async for output in stream] == [[5]]
    core.take()
    waiting = asyncio.create_task(llm.wait_kv_result("r"))
    await asyncio.sleep(0)
    llm.abort("r")
    llm.abort("r")
    assert core.take() == [AbortRequests(["r"])]
    assert (await waiting).reason == "the request was aborted"


async def test_abort_ends_the_stream(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm)
    core.take()
    core.tokens("r", [5])
    llm.abort("r")
    core.tokens("r", [6])
    outputs = [output async for output in stream]
    assert [output.token_ids for output in outputs] == [[5], []]
    assert outputs[-1].finish_reason == "abort"
    assert core.take() == [AbortRequests(["r"])]


async def test_cancelling_the_reader_aborts(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm)
    core.take()
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert core.take() == [AbortRequests(["r"])]


async def test_death_reaches_everybody_who_waits(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate(llm, PULL)
    waits = [
        asyncio.ensure_future(wait)
        for wait in (anext(stream), llm.wait_kv_result("r"), llm.reset_prefix_cache())
    ]
    await asyncio.sleep(0)
    core.die("worker 1 was killed")
    core.die("an echo")
    for error in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(error, EngineDeadError)
        assert str(error) == "worker 1 was killed"
    assert await llm.wait_dead() == "worker 1 was killed"


async def test_each_reset_has_its_own_answer(llm: AsyncLLM, core: FakeCore) -> None:
    resets = [asyncio.create_task(llm.reset_prefix_cache()) for _ in range(2)]
    await asyncio.sleep(0)
    first, second = core.take()
    assert isinstance(first, ResetPrefixCache) and isinstance(second, ResetPrefixCache)
    core.say(PrefixCacheReset(second.call_id, True))
    core.say(PrefixCacheReset(first.call_id, False))
    assert await asyncio.gather(*resets) == [False, True]


async def test_statistics_are_the_latest(llm: AsyncLLM, core: FakeCore) -> None:
    core.say(EngineCoreOutputs(stats=SchedulerStats(num_running=3)))
    core.say(EngineCoreOutputs())
    assert llm.stats.num_running == 3
    assert llm.ready.num_blocks == 7
