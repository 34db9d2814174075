"""The memory behind a prompt that another node computes is free when it has ended, without a
collection of garbage, whatever became of it: it holds the prompt, its images and its call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc
import pytest

from decode_node.disagg.prefill_events import KVTaken
from tests.decode_node.decode_fakes import FakeCall, FakeRequest, until
from tests.decode_node.test_prefill_client import (
    REQUEST,
    params,
    prefill_client,
    prefill_node,
)
from tests.decode_node.test_proxy import Bench
from tests.edge.left_behind import garbage_is_kept, left_behind

TIMEOUT_S = 30.0


async def asked(bench: Bench) -> tuple[asyncio.Task[object], FakeRequest, FakeCall]:
    task = asyncio.ensure_future(bench.start())
    return task, await bench.engine.added(), await bench.nodes.called()


async def ends(bench: Bench, task: asyncio.Task[object], call: FakeCall, attempt: int) -> None:
    fake = bench.engine.only
    call.first_token()
    call.taken()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake, attempt=attempt)
    bench.engine.produce_all(fake)
    await task


async def complete(bench: Bench) -> None:
    task, _, call = await asked(bench)
    await ends(bench, task, call, 0)


async def the_call_fails(bench: Bench) -> None:
    task, _, call = await asked(bench)
    call.fail("resource_exhausted")
    await ends(bench, task, await bench.nodes.called(2), 1)


async def the_kv_fails(bench: Bench) -> None:
    task, fake, call = await asked(bench)
    call.first_token()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake, ok=False)
    await ends(bench, task, await bench.nodes.called(2), 1)


async def all_calls_fail(bench: Bench) -> None:
    task, fake, call = await asked(bench)
    call.fail()
    (await bench.nodes.called(2)).fail()
    await until(lambda: ("local", None) in fake.calls, "a prompt computed here")
    bench.engine.produce_all(fake)
    await task


async def the_client_leaves(bench: Bench) -> None:
    task, fake, call = await asked(bench)
    call.first_token()
    await until(lambda: fake.has_first_token, "token one")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "way", [complete, the_call_fails, the_kv_fails, all_calls_fail, the_client_leaves]
)
async def test_nothing_waits_for_the_collector(
    way: Callable[[Bench], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # It would keep the errors that are logged.
    bench = Bench()

    async def once() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await way(bench)
        await bench.check_empty()
        bench.engine.requests.clear()
        bench.nodes.calls.clear()
        bench.records.clear()

    await once()
    with garbage_is_kept():
        await once()
        await once()
        assert not left_behind()


async def test_a_call_that_is_left_holds_no_prompt() -> None:
    """Each is left behind its last event, before the status that follows."""
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)

        async def once() -> None:
            async with aclosing(client.prefill(address, REQUEST, params())) as stream:
                async for event in stream:
                    if isinstance(event, KVTaken):
                        break
            servicer.requests.clear()

        await once()
        gc.disable()
        try:
            before = num_calls()
            await once()
            await once()
            assert num_calls() == before
        finally:
            gc.enable()


def num_calls() -> int:
    return sum(isinstance(one, grpc.aio.UnaryStreamCall) for one in gc.get_objects())
