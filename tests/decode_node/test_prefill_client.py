"""The client against a real gRPC server that does what a test says."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest

from decode_node.disagg import prefill_client as prefill_client_module
from decode_node.disagg.prefill_client import PrefillClient
from decode_node.disagg.prefill_events import FirstToken, KVTaken, PrefillError
from edge.http.event_loop import long_work
from edge.security.credentials import Credentials
from edge.tracing.context import TraceContext
from engine.contracts.request_spec import RequestSpec, decode_spec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.token_parts import MOST_TOGETHER
from engine.frontend.input_processor import GenerationRequest
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import KVPeer, KVTransferParams
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from tandem_pb import node_pb2, prefill_pb2, prefill_pb2_grpc
from tests.decode_node.decode_fakes import kv_peer, until
from tests.engine.core.tiny_engine import tiny_config
from tests.garbled_server import GARBAGE

US = kv_peer(tiny_config())
THEM = msgspec.structs.replace(kv_peer(tiny_config()), endpoints=(("10.0.0.1:9",),))
VOCAB_SIZE = tiny_config().model.vocab_size
REQUEST = GenerationRequest(
    "r",
    RequestSpec([1, 2, 3], SamplingParams(seed=7, logprobs=2), priority=2, cache_salt="s"),
)
Handler = Callable[[prefill_pb2.PrefillRequest, Any], AsyncIterator[prefill_pb2.PrefillEvent]]


class Servicer(prefill_pb2_grpc.PrefillServicer):
    """One prefill node of a test."""

    def __init__(self) -> None:
        self.peer: KVPeer = THEM
        self.load = node_pb2.NodeLoad()
        self.handshakes: list[KVPeer] = []
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.cancelled = 0
        self.before_handshake: Callable[[Any], Awaitable[None]] | None = None
        self.handler: Handler = _complete

    async def Handshake(self, request: prefill_pb2.HandshakeRequest, context: Any) -> Any:
        self.handshakes.append(peer_from_proto(request.decode))
        if self.before_handshake is not None:
            await self.before_handshake(context)
        return prefill_pb2.HandshakeReply(prefill=peer_to_proto(self.peer), load=self.load)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for event in self.handler(request, context):
                yield event
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def _complete(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
    yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
    logprobs = prefill_pb2.TokenLogprobs(token_ids=[9, 9, 4], logprobs=[-0.5, -0.5, -1.0], rank=1)
    token = prefill_pb2.FirstToken(
        token_id=9, logprobs=logprobs, num_cached_tokens=2, queue_s=0.1, prefill_s=0.2
    )
    yield prefill_pb2.PrefillEvent(first_token=token)
    yield prefill_pb2.PrefillEvent(done=prefill_pb2.Done(kv_bytes=10))


@asynccontextmanager
async def prefill_node() -> AsyncIterator[tuple[Servicer, str, grpc.aio.Server]]:
    servicer = Servicer()
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}", server
    finally:
        await server.stop(0)


@asynccontextmanager
async def prefill_client(handshake_timeout_s: float = 30.0) -> AsyncIterator[PrefillClient]:
    client = PrefillClient(US, VOCAB_SIZE, handshake_timeout_s, Credentials())
    try:
        yield client
    finally:
        await client.close()


def params(peer: KVPeer = THEM) -> KVTransferParams:
    return KVTransferParams(do_remote_prefill=True, transfer_id="ab" * 16, attempt=1, peer=peer)


async def events(
    client: PrefillClient, address: str, request: GenerationRequest = REQUEST
) -> list[object]:
    async with aclosing(client.prefill(address, request, params())) as stream:
        return [event async for event in stream]


async def test_a_prompt_goes_out_and_its_token_comes_back() -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        assert await client.handshake(address) == THEM
        first, taken = await events(client, address)
        assert isinstance(first, FirstToken) and isinstance(taken, KVTaken)
        assert (first.token_id, first.num_cached_tokens) == (9, 2)
        assert first.logprobs is not None and first.logprobs.token_ids == [9, 9, 4]
        (sent,) = servicer.requests
        assert (sent.transfer_id, sent.attempt) == ("ab" * 16, 1)
        assert sent.expected_epoch == THEM.epoch
        assert decode_spec(sent.spec, list(sent.prompt_token_ids)) == REQUEST.spec


async def test_a_long_prompt_is_written_beside_the_event_loop_and_arrives_whole() -> None:
    """Others go ahead while the thread for long work has something else to do."""
    ids = [1 + i % (VOCAB_SIZE - 1) for i in range(2 * MOST_TOGETHER + 7)]
    long = dataclasses.replace(REQUEST, spec=REQUEST.spec.with_prompt(ids))
    goes_on = threading.Event()
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)
        busy = asyncio.create_task(long_work.run(True, goes_on.wait))
        slow = asyncio.create_task(events(client, address, long))
        try:
            assert len(await events(client, address)) == 2
            assert not slow.done()
        finally:
            goes_on.set()
        await busy
        assert len(await slow) == 2
        short, sent = servicer.requests
        assert list(short.prompt_token_ids) == REQUEST.spec.prompt_token_ids
        assert decode_spec(sent.spec, list(sent.prompt_token_ids)) == long.spec


async def test_one_handshake_with_a_node_is_enough() -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await asyncio.gather(*(client.handshake(address) for _ in range(5)))
        assert servicer.handshakes == [US]


@pytest.mark.parametrize("code", ["FAILED_PRECONDITION", "UNAVAILABLE"])
@pytest.mark.parametrize("as_event", [True, False])
async def test_after_some_failures_the_handshake_is_repeated(code: str, as_event: bool) -> None:
    async def refuse(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        if as_event:
            failed = prefill_pb2.Failed(code=code.lower(), message="restarted")
            yield prefill_pb2.PrefillEvent(failed=failed)
        await context.abort(grpc.StatusCode[code], "restarted")

    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)
        servicer.handler = refuse
        with pytest.raises(PrefillError, match="restarted"):
            await events(client, address)
        restarted = msgspec.structs.replace(THEM, epoch=THEM.epoch ^ 1)
        servicer.peer = restarted
        assert await client.handshake(address) == restarted
        assert len(servicer.handshakes) == 2


async def test_after_kv_that_did_not_come_its_endpoints_are_learnt_again() -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)
        client.forget(address)
        client.forget("nobody:1")
        moved = msgspec.structs.replace(THEM, endpoints=(("10.0.0.9:7",),))
        servicer.peer = moved
        assert (await client.handshake(address)).endpoints == (("10.0.0.9:7",),)


async def test_nodes_that_are_not_used_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
        await asyncio.Event().wait()

    async with (
        prefill_node() as (unused, unused_address, _),
        prefill_node() as (busy, busy_address, _),
        prefill_node() as (_, new_address, _),
        prefill_client() as client,
    ):
        busy.handler = hang
        for address in (unused_address, busy_address):
            await client.handshake(address)
        reading = asyncio.create_task(events(client, busy_address))
        await until(lambda: len(busy.requests) == 1, "the call")
        monkeypatch.setattr(prefill_client_module, "_FORGOTTEN_S", 0.0)
        await client.handshake(new_address)
        monkeypatch.setattr(prefill_client_module, "_FORGOTTEN_S", 3600.0)
        for address in (unused_address, busy_address):
            await client.handshake(address)
        assert (len(unused.handshakes), len(busy.handshakes)) == (2, 1)
        assert not reading.done()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_other_failures_keep_the_handshake() -> None:
    async def refuse(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        failed = prefill_pb2.Failed(code="resource_exhausted", message="the queue is long")
        yield prefill_pb2.PrefillEvent(failed=failed)

    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)
        servicer.handler = refuse
        with pytest.raises(PrefillError, match="queue") as caught:
            await events(client, address)
        assert caught.value.code == "resource_exhausted"
        await client.handshake(address)
        assert len(servicer.handshakes) == 1


def with_group(**fields: object) -> KVLayout:
    """Their layout, with other fields in its only group."""
    (group,) = THEM.layout.groups
    changed = msgspec.structs.replace(group, **fields)
    return msgspec.structs.replace(THEM.layout, groups=(changed,))


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("model_hash", msgspec.structs.replace(THEM.layout, model_hash="other")),
        ("dtype", with_group(dtype="bfloat16")),
        ("layers", with_group(layers=(0,))),
    ],
)
async def test_nodes_that_do_not_fit_are_refused_by_field(field: str, layout: KVLayout) -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        servicer.peer = msgspec.structs.replace(THEM, layout=layout)
        with pytest.raises(PrefillError, match=field) as caught:
            await client.handshake(address)
        assert caught.value.code == "handshake_mismatch"


async def test_block_and_tensor_parallel_sizes_may_differ() -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        layout = msgspec.structs.replace(with_group(block_size=64), tp_size=2)
        servicer.peer = msgspec.structs.replace(THEM, layout=layout, endpoints=(("h:1",),) * 2)
        assert (await client.handshake(address)).layout == layout


@pytest.mark.parametrize(
    "endpoints",
    [(), ((),), (("10.0.0.1:9",), ("10.0.0.2:9",)), (("nowhere",),), (("h:70000",),),
     (("a:1",) * 65,), (("h" * 5000 + ":1",),)],
    ids=["no ranks", "no process", "more ranks", "no port", "high port", "many", "long"],
)  # fmt: skip
async def test_endpoints_that_cannot_be_are_refused(endpoints: tuple[tuple[str, ...], ...]) -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        servicer.peer = msgspec.structs.replace(THEM, endpoints=endpoints)
        with pytest.raises(PrefillError) as caught:
            await client.handshake(address)
        assert caught.value.code == "wrong_answer"
        assert len(str(caught.value)) < 1000


async def test_a_token_outside_of_the_vocabulary_goes_no_further() -> None:
    async def lie(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        token = prefill_pb2.FirstToken(token_id=2**32 - 1)
        yield prefill_pb2.PrefillEvent(first_token=token)

    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)
        servicer.handler = lie
        with pytest.raises(PrefillError, match="4294967295") as caught:
            await events(client, address)
        assert caught.value.code == "wrong_answer"


class _Garbled(grpc.GenericRpcHandler):
    """Answers the first `num_right` calls as a prefill node, and all others with bytes that are no
    message."""

    def __init__(self, num_right: int) -> None:
        self.num_right = num_right

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        if details.method.endswith("/Handshake"):
            return grpc.unary_unary_rpc_method_handler(self._handshake)
        return grpc.unary_stream_rpc_method_handler(self._prefill)

    async def _handshake(self, request: bytes, context: Any) -> bytes:
        self.num_right -= 1
        reply = prefill_pb2.HandshakeReply(prefill=peer_to_proto(THEM))
        return GARBAGE if self.num_right < 0 else reply.SerializeToString()

    async def _prefill(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield GARBAGE


async def test_bytes_that_are_no_message_are_a_wrong_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Garbled(num_right=1),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with prefill_client() as client:
        await client.handshake(address)
        with pytest.raises(PrefillError, match=f"{address}: .*no message; see that") as caught:
            await events(client, address)
        assert caught.value.code == "wrong_answer"
        with pytest.raises(PrefillError, match=f"{address}: .*no message; see that") as caught:
            await client.handshake(address)
        assert caught.value.code == "wrong_answer", "it has forgotten the first handshake"
    assert not [record for record in caplog.records if record.exc_info]
    await server.stop(0)


async def test_a_stopping_node_gets_no_work() -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        servicer.load = node_pb2.NodeLoad(draining=True)
        with pytest.raises(PrefillError, match="stopping"):
            await client.handshake(address)


async def test_a_node_that_is_drained_by_call_takes_what_comes_all_the_same() -> None:
    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        servicer.load = node_pb2.NodeLoad(draining=True, drained=True)
        await client.handshake(address)


async def test_nobody_there_is_found_out_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_client_module, "_AVOID_S", 3600.0)
    async with prefill_node() as (_, address, server), prefill_client() as client:
        await server.stop(0)
        with pytest.raises(PrefillError) as caught:
            await client.handshake(address)
        assert caught.value.code == "unreachable"
        with pytest.raises(PrefillError, match="a moment ago"):
            await client.handshake(address)


async def test_a_silent_node_does_not_hold_up_for_long() -> None:
    async def silent(context: Any) -> None:
        await asyncio.Event().wait()

    async with prefill_node() as (servicer, address, _), prefill_client(0.1) as client:
        servicer.before_handshake = silent
        with pytest.raises(PrefillError) as caught:
            await client.handshake(address)
        assert caught.value.code == "deadline_exceeded"


async def test_a_lost_connection_is_an_error_and_not_the_end() -> None:
    async def hang(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
        await asyncio.Event().wait()

    async with prefill_node() as (servicer, address, server), prefill_client() as client:
        await client.handshake(address)
        servicer.handler = hang
        reading = asyncio.create_task(events(client, address))
        await until(lambda: len(servicer.requests) == 1, "the call")
        await server.stop(0)
        with pytest.raises(PrefillError):
            await reading


async def test_leaving_cancels_the_call() -> None:
    async def hang(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
        await asyncio.Event().wait()

    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)
        servicer.handler = hang
        reading = asyncio.create_task(events(client, address))
        await until(lambda: len(servicer.requests) == 1, "the call")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: servicer.cancelled == 1, "cancelled on the other side")


async def test_a_stream_that_stops_early_just_ends() -> None:
    """The proxy knows what is missing."""

    async def stop(request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())

    async with prefill_node() as (servicer, address, _), prefill_client() as client:
        await client.handshake(address)
        servicer.handler = stop
        assert await events(client, address) == []


async def test_the_trace_and_resumed_output_reach_the_prefill_node() -> None:
    trace = TraceContext("0af7651916cd43dd8448eb211c80319c", "01", "vendor=1")
    request = dataclasses.replace(REQUEST, spec=REQUEST.spec.resumed_after([8]), trace=trace)
    async with prefill_node() as (servicer, address, _):
        client = PrefillClient(US, VOCAB_SIZE, 5.0, Credentials())
        try:
            await client.handshake(address)
            async with aclosing(client.prefill(address, request, params())) as stream:
                assert [type(event) async for event in stream] == [FirstToken, KVTaken]
        finally:
            await client.close()
        (metadata,) = servicer.metadata
        (call,) = request.calls.spans(0.0)
        assert metadata["traceparent"] == f"00-{trace.trace_id}-{call.span_id}-01"
        assert metadata["tracestate"] == "vendor=1"
        (sent,) = servicer.requests
        assert decode_spec(sent.spec, list(sent.prompt_token_ids)) == request.spec
        assert request.spec.resumed_token_ids == [8]
