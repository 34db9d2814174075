"""The memory behind a prompt is free when its call or its connection ends, without a collection of
garbage: a node that runs for days meets callers that vanish, and collections of all come never."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import grpc
import pytest

from tandem_pb import prefill_pb2_grpc
from tests.edge.left_behind import garbage_is_kept, left_behind
from tests.prefill_node.prefill_fakes import ServedPrefill, served_prefill, until
from tests.prefill_node.test_prefill_service import accepted, read, refusal


async def complete(node: ServedPrefill) -> None:
    call, prompt = await accepted(node)
    node.engine.samples(prompt)
    await read(call)
    node.engine.kv_is_taken(prompt)
    assert (await read(call)).WhichOneof("event") == "done"
    assert await read(call) is grpc.aio.EOF


async def cancelled_before_the_token(node: ServedPrefill) -> None:
    call, _ = await accepted(node)
    call.cancel()


async def cancelled_before_its_kv_is_taken(node: ServedPrefill) -> None:
    call, prompt = await accepted(node)
    node.engine.samples(prompt)
    await read(call)
    call.cancel()


async def late(node: ServedPrefill) -> None:
    stub = node.stub
    node.stub = _WithTimeout(stub)
    try:
        call, _ = await accepted(node)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await read(call)
    finally:
        node.stub = stub


async def hung_up(node: ServedPrefill) -> None:
    """Two calls are on the connection that ends."""
    stub = node.stub
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{node.port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        node.stub = prefill_pb2_grpc.PrefillStub(channel)  # type: ignore[no-untyped-call]
        await accepted(node)
        node.engine.prompts.clear()
        await accepted(node, transfer_id="f" * 32)
        node.stub = stub


async def failed(node: ServedPrefill) -> None:
    call, prompt = await accepted(node)
    node.engine.samples(prompt)
    await read(call)
    node.engine.kv_is_taken(prompt, ok=False)
    assert (await read(call)).WhichOneof("event") == "failed"
    with contextlib.suppress(grpc.aio.AioRpcError):
        await read(call)


async def refused(node: ServedPrefill) -> None:
    await refusal(node, transfer_id="x")
    await refusal(node, expected_epoch=1)


class _WithTimeout:
    def __init__(self, stub: object) -> None:
        self._stub = stub

    def Prefill(self, request: object, metadata: object = None) -> object:
        return self._stub.Prefill(request, metadata=metadata, timeout=0.05)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "way",
    [complete, cancelled_before_the_token, cancelled_before_its_kv_is_taken, late, hung_up, failed,
     refused],
)  # fmt: skip
async def test_nothing_waits_for_the_collector(
    way: Callable[[ServedPrefill], Awaitable[None]],
) -> None:
    async with served_prefill() as node:

        async def once() -> None:
            await way(node)
            await until(lambda: node.servicer.open.count == 0, "no open call")
            node.engine.prompts.clear()

        await once()
        with garbage_is_kept():
            await once()
            await once()
            assert not left_behind()
