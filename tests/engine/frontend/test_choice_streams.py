"""Choices of one prompt are one message to the engine core, and one stream."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SupplyFirstToken,
)
from engine.contracts.outputs import SiblingTokens, TokenLogprobs
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.request_stream import RequestStream
from kv_transfer.metadata import KVTransferParams
from tests.engine.core.tiny_engine import make_request
from tests.engine.frontend.fake_core import FakeCore

PULL = KVTransferParams(do_remote_prefill=True, transfer_id="00" * 16)
EXPORT = KVTransferParams(do_remote_decode=True, transfer_id="11" * 16)


def _generate_choices(
    llm: AsyncLLM, params: KVTransferParams | None = None, count: int = 3, **sampling: Any
) -> RequestStream:
    choices = [make_request(f"r.{i}", 2, **sampling) for i in range(count)]
    for i, choice in enumerate(choices):
        choice.spec = choice.spec.with_sampling(seed=7 + i)
    request = GenerationRequest.of_choices("r", choices)
    request.kv_transfer_params = params
    return llm.generate(request)


async def test_choices_are_one_message_and_one_stream(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate_choices(llm)
    (message,) = core.take()
    assert isinstance(message, EngineCoreRequest)
    assert (message.request_id, message.choice_ids) == ("r", ("r.0", "r.1", "r.2"))
    assert message.spec.seeds == (7, 8, 9)
    core.tokens("r.2", [5], "stop")
    core.tokens("r.0", [6], "stop")
    core.tokens("r.1", [7], "stop")
    found = [(output.request_id, output.token_ids) async for output in stream]
    assert found == [("r.2", [5]), ("r.0", [6]), ("r.1", [7])]
    stream.close()
    assert core.take() == []
    assert GenerationRequest.of_choices("r", [make_request("a", 2)]).request_id == "a"


async def test_closing_aborts_the_choices_that_are_left(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate_choices(llm)
    core.tokens("r.1", [5], "stop")
    llm.abort("r.0")
    core.take()
    assert (await anext(stream)).token_ids == [5]
    assert (await anext(stream)).finish_reason == "abort"
    stream.close()
    assert core.take() == [AbortRequests(["r.2"])]
    for names in (["r.0", "r"], ["r", "r.1"]):
        with pytest.raises(ValueError, match="in use"):
            again = [llm.generate(make_request(name, 2)) for name in names]
            again.append(_generate_choices(llm))
        llm.abort(names[0])
    llm.abort("r")


async def test_aborting_the_prompt_ends_all_its_choices(llm: AsyncLLM, core: FakeCore) -> None:
    stream = _generate_choices(llm, PULL)
    core.take()
    result = asyncio.create_task(llm.wait_kv_result("r"))
    llm.abort("r")
    assert core.take() == [AbortRequests([f"r.{i}"]) for i in range(3)]
    assert [output.finish_reason async for output in stream] == ["abort"] * 3
    assert not (await result).ok


async def test_each_choice_gets_its_first_token_once(llm: AsyncLLM, core: FakeCore) -> None:
    """One choice ends with it, another one was aborted before; both concern nobody else."""
    stream = _generate_choices(llm, PULL, 4, stop_token_ids=(6,))
    llm.abort("r.3")
    core.take()
    found = [TokenLogprobs([token], [-0.5], 1) for token in (5, 6, 7, 8)]
    siblings = SiblingTokens([6, 7, 8], found[1:])
    assert llm.supply_first_token("r", 5, found[0], siblings=siblings)
    assert llm.supply_first_token("r", 9, found[0], siblings=siblings)
    assert core.take() == [SupplyFirstToken("r", 5, [6, 7, 8]), AbortRequests(["r.1"])]
    outputs = [await anext(stream) for _ in range(4)]
    assert [output.token_ids for output in outputs] == [[], [5], [6], [7]]
    assert [output.logprobs for output in outputs[1:]] == [[one] for one in found[:3]]
    assert [output.finish_reason for output in outputs] == ["abort", None, "stop", None]
    result = asyncio.create_task(llm.wait_kv_result("r"))
    core.tokens("r.0", [8], "length")
    core.tokens("r.2", [9], "length")
    assert [output.token_ids async for output in stream] == [[8], [9]]
    assert (await result).reason == "the request has ended"


async def test_only_tokens_of_choices_do_not_enter_the_core(llm: AsyncLLM, core: FakeCore) -> None:
    params = msgspec.structs.replace(PULL, first_token_only=True)
    stream = _generate_choices(llm, params, max_tokens=1)
    assert not llm.supply_first_token("r", 5, siblings=SiblingTokens([6, 7]))
    assert [output.token_ids async for output in stream] == [[5], [6], [7]]
    assert core.take() == []

    stream = _generate_choices(llm, params, max_tokens=1)
    llm.abort("r.1")
    llm.prefill_locally("r")
    added, aborted = core.take()
    assert isinstance(added, EngineCoreRequest)
    assert added.kv_transfer_params is None
    assert aborted == AbortRequests(["r.1"])
    stream.close()


async def test_an_engine_that_dies_ends_the_stream_of_choices(
    llm: AsyncLLM, core: FakeCore
) -> None:
    stream = _generate_choices(llm)
    core.die("out of cheese")
    with pytest.raises(EngineDeadError, match="cheese"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_prefill_node_gets_all_first_tokens_in_one_output(
    llm: AsyncLLM, core: FakeCore
) -> None:
    request = make_request("r", 2, max_tokens=1)
    request.kv_transfer_params = EXPORT
    stream = llm.generate(request)
    siblings = SiblingTokens([6, 7])
    output = EngineCoreOutput("r", [5], "length", siblings=siblings)
    core.say(EngineCoreOutputs(outputs=[output]))
    assert (await anext(stream)).siblings == siblings
    llm.abort("r")
