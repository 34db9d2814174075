"""The decode node's side of the `Prefill` service.

    1. `handshake`: who is at this address, does its KV fit ours, where is it pulled? Kept until the
       node restarts or disappoints, or its KV does (`forget`).
    2. `prefill`: one prompt. Gives the prompt's log probabilities (if asked for), the first token,
       then that all KV was taken; or raises.
       Leaving the iterator cancels the call, which aborts the request on the prefill node.

One channel for each node, with keepalive, so that a node that went silent is noticed in seconds.
A node that was not asked for anything for an hour is forgotten: it may be gone for good.
gRPC's own retries are off: the proxy decides what follows a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import grpc

from decode_node.disagg.prefill_events import (
    AVOIDED,
    WRONG_ANSWER,
    PrefillError,
    PrefillEvent,
    PrefillEvents,
)
from edge.grpc_answers import GarbledAnswer, QuietChannel, readable
from edge.http.event_loop import long_work
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from edge.security.renewed_channel import RenewedChannel
from engine.contracts.request_spec import encode_spec
from engine.contracts.token_parts import MOST_TOGETHER, token_parts
from engine.frontend.input_processor import GenerationRequest
from kv_transfer.errors import HandshakeMismatch, PeerLost
from kv_transfer.metadata import KVPeer, KVTransferParams
from kv_transfer.wire.handshake import check_endpoints, peer_from_proto, peer_to_proto
from tandem_pb import prefill_pb2, prefill_pb2_grpc

_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Without it a ping that is not answered is waited for a minute, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_AVOID_S = 1.0
"""A node that could not be reached is not asked again for this many seconds."""
_FORGOTTEN_S = 3600.0
_HANDSHAKE_AGAIN = {
    "failed_precondition",
    "unavailable",
    "unreachable",
    "engine_dead",
    "timeout",
    WRONG_ANSWER,
}


class _Node:
    """Holds one prefill node's channel and what it said of itself."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.channel = RenewedChannel(
            lambda: credentials.channel(address, Role.PREFILL, _CHANNEL_OPTIONS),
            address,
            credentials,
        )
        self.peer: KVPeer | None = None
        self.avoid_until = 0.0
        self.handshake_lock = asyncio.Lock()
        self.used_at = time.monotonic()
        self.num_calls = 0
        """Prompts under way there."""

    async def stub(self) -> prefill_pb2_grpc.PrefillStub:
        """Returns a stub for one call. Raises `PrefillError` if the node must not be dialled."""
        try:
            channel = await self.channel.get()
        except (PlaintextRefused, ValueError) as error:
            raise PrefillError("not_dialled", str(error)) from None
        return prefill_pb2_grpc.PrefillStub(QuietChannel(channel))  # type: ignore[no-untyped-call]


class PrefillClient:
    """Talks to all prefill nodes. `us` is what prefill nodes learn of this node, `credentials` what
    it shows them. What they say is believed only where it fits `us` and a vocabulary of
    `vocab_size`. `close` at the end."""

    def __init__(
        self, us: KVPeer, vocab_size: int, handshake_timeout_s: float, credentials: Credentials
    ) -> None:
        self._us = us
        self._vocab_size = vocab_size
        self._credentials = credentials
        self._handshake_timeout_s = handshake_timeout_s
        self._nodes: dict[str, _Node] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def handshake(self, address: str) -> KVPeer:
        """Returns what a prefill node says of itself. Raises `PrefillError` when it is unreachable,
        stopping, or its KV does not fit ours."""
        node = self._node(address)
        if node.peer is None:
            async with node.handshake_lock:
                if node.peer is None:
                    node.peer = await self._handshake(address, node)
        return node.peer

    def forget(self, address: str) -> None:
        """Forgets what a node said of itself, after its KV could not be pulled: where it is pulled
        may have changed."""
        if address in self._nodes:
            self._nodes[address].peer = None

    async def prefill(
        self, address: str, request: GenerationRequest, params: KVTransferParams
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Yields the events of one attempt. Ends after `KVTaken`; raises `PrefillError`."""
        node = self._node(address)
        trace = request.calls.begin(request.trace, address) if request.trace is not None else {}
        metadata = (*trace.items(), *self._credentials.metadata())
        stub = await node.stub()
        is_long = len(request.spec.prompt_token_ids) > MOST_TOGETHER
        message = await long_work.run(is_long, partial(_message, request, params))
        call = stub.Prefill(message, metadata=metadata)
        peer = params.peer
        num_groups = 1 + len(peer.groups) if peer is not None and peer.names_group else 0
        events = PrefillEvents(request.prefill_spec, self._vocab_size, num_groups)
        node.num_calls += 1
        try:
            # Closed, because it and the call hold each other while it is not at its end.
            async with aclosing(aiter(call)) as messages:
                async for message in messages:
                    event = events.read(readable(message))
                    if event is not None:
                        yield event
        except grpc.aio.AioRpcError as error:
            request.calls.end(_name(error))
            raise self._disappointed(node, _name(error), f"{address}: {error.details()}") from None
        except GarbledAnswer as error:
            request.calls.end(WRONG_ANSWER)
            raise self._disappointed(node, WRONG_ANSWER, f"{address}: {error}") from None
        except PrefillError as error:
            request.calls.end(error.code)
            raise self._disappointed(node, error.code, f"{address}: {error}") from None
        finally:
            node.num_calls -= 1
            request.calls.end()
            call.cancel()

    async def close(self) -> None:
        channels = (node.channel.close() for node in self._nodes.values())
        await asyncio.gather(*channels, *self._closing)
        self._nodes.clear()

    def _node(self, address: str) -> _Node:
        node = self._nodes.get(address)
        if node is None:
            self._forget_unused()
            node = self._nodes[address] = _Node(address, self._credentials)
        node.used_at = time.monotonic()
        return node

    def _forget_unused(self) -> None:
        horizon = time.monotonic() - _FORGOTTEN_S
        for address, node in list(self._nodes.items()):
            if not node.num_calls and node.used_at < horizon:
                del self._nodes[address]
                closing = asyncio.create_task(node.channel.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def _disappointed(self, node: _Node, code: str, message: str) -> PrefillError:
        """Returns what to raise. The node may not be who it was: shake hands
        again before it gets more work."""
        if code in _HANDSHAKE_AGAIN:
            node.peer = None
        return PrefillError(code, message)

    async def _handshake(self, address: str, node: _Node) -> KVPeer:
        if time.monotonic() < node.avoid_until:
            raise PrefillError(AVOIDED, f"{address} did not answer a moment ago")
        try:
            stub = await node.stub()
            answer: prefill_pb2.HandshakeReply | None = await stub.Handshake(
                prefill_pb2.HandshakeRequest(decode=peer_to_proto(self._us)),
                timeout=self._handshake_timeout_s,
                metadata=self._credentials.metadata(),
            )
            reply = readable(answer)
            peer = peer_from_proto(reply.prefill)
            self._us.layout.check_compatible(peer.layout)
            check_endpoints(peer)
        except grpc.aio.AioRpcError as error:
            node.avoid_until = time.monotonic() + _AVOID_S
            raise PrefillError(_name(error), f"{address}: {error.details()}") from None
        except HandshakeMismatch as error:
            node.avoid_until = time.monotonic() + _AVOID_S
            raise PrefillError("handshake_mismatch", f"{address}: {error}") from None
        except (GarbledAnswer, PeerLost) as error:
            node.avoid_until = time.monotonic() + _AVOID_S
            raise PrefillError(WRONG_ANSWER, f"{address}: {error}") from None
        if reply.load.draining and not reply.load.drained:
            node.avoid_until = time.monotonic() + _AVOID_S
            raise PrefillError("draining", f"{address} is stopping")
        return peer


def _message(request: GenerationRequest, params: KVTransferParams) -> bytes:
    """Returns the bytes of a call. Those of one message in parts, each with some of the prompt, are
    those of the whole."""
    assert params.peer is not None
    head = prefill_pb2.PrefillRequest(
        request_id=request.request_id,
        transfer_id=params.transfer_id,
        attempt=params.attempt,
        expected_epoch=params.peer.epoch,
        spec=encode_spec(request.prefill_spec),
        first_token_only=params.first_token_only,
        prefix_holder=request.prefix_holder,
        reads_group=params.peer.names_group,
        images=[
            prefill_pb2.ImagePixels(rows=one.rows, columns=one.columns, patches=one.patches)
            for one in request.pixels
        ],
    )
    parts = [
        prefill_pb2.PrefillRequest(prompt_token_ids=part).SerializeToString()
        for part in token_parts(request.spec.prompt_token_ids)
    ]
    return b"".join([head.SerializeToString(), *parts])


def _name(error: grpc.aio.AioRpcError) -> str:
    return (
        "unreachable" if error.code() is grpc.StatusCode.UNAVAILABLE else error.code().name.lower()
    )
