"""A node refuses wrong calls of `Prefixes`, and no prompt waits for a bad peer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import pytest
import pytest_asyncio
from msgspec.structs import replace

from cli.local_cluster.cluster import free_ports
from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import (
    EngineReady,
    OfferPrefix,
    PrefixAnswer,
    PrefixAsk,
    PrefixOffered,
)
from engine.contracts.prefix_holder import HashChains, PrefixHolder, checked_holder
from engine.frontend.calls import prefix_calls
from engine.frontend.calls.engine_calls import EngineCalls
from engine.frontend.calls.prefix_calls import PrefixCalls
from engine.node import prefix_client
from engine.node.prefix_client import PrefixClient
from engine.node.prefix_servicer import CALLERS, PrefixServicer
from engine.node.services.services_server import ServicesServer
from engine.node.status import NodeWork
from kv_transfer.layout import KVLayout, attention_group
from kv_transfer.metadata import KVPeer
from router.nodes.operations import named_node
from tandem_pb import prefixes_pb2, prefixes_pb2_grpc
from tests.garbled_server import garbled_server, only_warning
from tests.router.fault_proxy import FaultProxy

LAYOUT = KVLayout(
    groups=(attention_group(layers=[0], heads=1, head_dim=4, dtype="float32", block_size=16),),
    tp_size=1,
    model_hash="m",
)
HOLDER = KVPeer(engine_id="holder", epoch=3, layout=LAYOUT, endpoints=(("127.0.0.1:9",),))
US = KVPeer(engine_id="us", epoch=4, layout=LAYOUT)


class Engine:
    """Holds as many tokens as `num_tokens` says."""

    def __init__(self) -> None:
        self.ready = EngineReady(num_blocks=8, peer=HOLDER)
        self.num_tokens = 32
        self.asked: list[HashChains] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @property
    def prefixes(self) -> Engine:
        return self

    async def offer(self, chains: HashChains) -> PrefixOffered:
        self.asked.append(chains)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return PrefixOffered(1, "ab" * 16 if self.num_tokens else "", self.num_tokens)


@dataclass
class Status:
    work: NodeWork = field(default_factory=NodeWork)

    def fault(self) -> str:
        return ""


@dataclass
class Node:
    engine: Engine
    status: Status
    address: str
    client: PrefixClient

    async def ask(self, count: int = 3, size: int = 16) -> tuple[object, int]:
        chains = {size: [b"%032d" % i for i in range(count)]}
        return await self.client.ask(PrefixAsk("r", 1, self.address, chains))


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    credentials = Credentials(SecurityConfig())
    engine, status = Engine(), Status()
    server = grpc_server(credentials, engine, status)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.start(listener)
    client = PrefixClient(lambda: US, credentials)
    yield Node(engine, status, f"prefill/127.0.0.1:{listener.getsockname()[1]}", client)
    await client.close()
    await server.stop()
    listener.close()


def grpc_server(credentials: Credentials, engine: Engine, status: Status) -> ServicesServer:
    server = ServicesServer(credentials, CALLERS, 1 << 22)
    prefixes_pb2_grpc.add_PrefixesServicer_to_server(  # type: ignore[no-untyped-call]
        PrefixServicer(engine, status),  # type: ignore[arg-type]
        server,
    )
    return server


@pytest.mark.asyncio
async def test_what_is_held_is_told_with_where_to_pull_it(node: Node) -> None:
    params, count = await node.ask()
    assert count == 32
    assert params is not None and params.transfer_id == "ab" * 16  # type: ignore[attr-defined]
    assert params.peer == HOLDER  # type: ignore[attr-defined]
    node.engine.num_tokens = 0
    assert await node.ask() == (None, 0)
    await node.ask(count=70_000)
    assert len(node.engine.asked[-1][16]) == 1 << 16, "what is behind them is computed"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "peer",
    [
        replace(HOLDER, engine_id="us"),
        replace(HOLDER, layout=replace(LAYOUT, model_hash="other")),
        replace(HOLDER, layout=replace(LAYOUT, draft_hash="d", num_draft_layers=0)),
        replace(HOLDER, endpoints=()),
    ],
    ids=["itself", "model", "drafter", "nowhere"],
)
async def test_a_peer_that_does_not_fit_is_left_alone(node: Node, peer: KVPeer) -> None:
    node.engine.ready.peer = peer
    assert await node.ask() == (None, 0)
    asked = len(node.engine.asked)
    assert await node.ask() == (None, 0)
    assert len(node.engine.asked) == asked, "it is avoided for a while"


@pytest.mark.asyncio
async def test_a_peer_of_bytes_that_are_no_message_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = PrefixClient(lambda: US, Credentials(SecurityConfig()))
    async with garbled_server() as address:
        ask = PrefixAsk("r", 1, f"prefill/{address}", {16: [b"%032d" % 0]})
        assert await client.ask(ask) == (None, 0)
        told = only_warning(caplog)
        assert f"prefill/{address} gives no prefixes" in told and "no message; see that" in told
        assert await client.ask(ask) == (None, 0)
        assert not caplog.records, "it is avoided for a while"
        await client.close()


@pytest.mark.asyncio
async def test_a_connection_that_the_network_has_lost_is_not_asked_over_again(node: Node) -> None:
    """Neither end is told of it: the next question goes over a new one."""
    port = int(node.address.rpartition(":")[2])
    async with FaultProxy(port) as proxy:
        chains = {16: [b"%032d" % i for i in range(3)]}
        ask = PrefixAsk("r", 1, f"prefill/127.0.0.1:{proxy.port}", chains)
        assert (await node.client.ask(ask))[1] == 32
        proxy.lose()
        assert await node.client.ask(ask) == (None, 0)
        node.client._avoid_until.clear()
        assert (await node.client.ask(ask))[1] == 32
        await node.client.close()


@pytest.mark.asyncio
async def test_nothing_stays_of_peers_that_have_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods that are rolled never come back at their addresses."""
    monkeypatch.setattr(prefix_client, "_AVOID_S", 0.0)
    for port in free_ports(3):
        ask = PrefixAsk("r", 1, f"prefill/127.0.0.1:{port}", {16: [b"%032d" % 0]})
        assert await node.client.ask(ask) == (None, 0)
    assert len(node.client._avoid_until) == 1
    assert not node.client._channels and not node.client._num_open


@pytest.mark.asyncio
async def test_a_question_is_not_cut_off_by_questions_to_other_peers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_client, "_MAX_PEERS", 1)
    port = int(node.address.rpartition(":")[2])
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(port)) for _ in range(4)]
        asks = [
            PrefixAsk("r", 1, f"prefill/127.0.0.1:{proxy.port}", {16: [b"%032d" % 0]})
            for proxy in proxies
        ]
        node.engine.may_answer.clear()
        first = asyncio.create_task(node.client.ask(asks[0]))
        async with asyncio.timeout(30):
            while not node.engine.asked:
                await asyncio.sleep(0.01)
        node.engine.may_answer, may_answer = asyncio.Event(), node.engine.may_answer
        node.engine.may_answer.set()
        for ask in asks[1:]:
            assert (await node.client.ask(ask))[1] == 32
        assert len(node.client._channels) == 2, "that is one more than there may be"
        may_answer.set()
        assert (await first)[1] == 32
        await node.client.ask(asks[1])
        assert len(node.client._channels) == 1 and not node.client._num_open
        await node.client.close()


@pytest.mark.asyncio
async def test_a_peer_whose_blocks_have_other_sizes_is_left_alone(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    assert await node.ask(size=32) == (None, 0)
    assert "differ in block_size: this node has (16,), the peer has (32,)" in caplog.text
    assert not node.engine.asked


@pytest.mark.asyncio
async def test_what_a_holder_refuses(node: Node) -> None:
    node.status.work.draining = True
    assert await node.ask() == (None, 0)
    assert not node.engine.asked
    node.status.work.draining = False
    channel = grpc.aio.insecure_channel(node.address.removeprefix("prefill/"))
    stub = prefixes_pb2_grpc.PrefixesStub(channel)  # type: ignore[no-untyped-call]
    for hashes in ([b"x" * 33], [b"x" * 31], [b"n" * 32] * 70_000):
        chain = prefixes_pb2.HashChain(block_size=16, hashes=hashes)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await stub.Offer(prefixes_pb2.OfferRequest(chains=[chain]))
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await stub.Offer(prefixes_pb2.OfferRequest())
    assert told.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "version" in str(told.value.details())
    await channel.close()
    assert not node.engine.asked


@pytest.mark.asyncio
async def test_a_holder_whose_engine_died_gives_nothing(node: Node) -> None:
    node.engine.error = EngineDeadError("gone")
    assert await node.ask() == (None, 0)


@pytest.mark.asyncio
async def test_every_ask_is_answered() -> None:
    sent: list[object] = []
    calls = PrefixCalls(EngineCalls(sent.append))
    ask = PrefixAsk("r", 7, "prefill/a:1", {})

    async def fail(ask: PrefixAsk) -> tuple[None, int]:
        raise RuntimeError("the test wanted it")

    for client in (None, fail):
        calls.ask = client
        calls.on_asks([ask])
        while len(calls._asking):
            await asyncio.sleep(0)
    assert sent == [PrefixAnswer("r", 7), PrefixAnswer("r", 7)]


@pytest.mark.asyncio
async def test_offers_end_with_the_engine() -> None:
    sent: list[OfferPrefix] = []
    ledger = EngineCalls(sent.append)  # type: ignore[arg-type]
    calls = PrefixCalls(ledger)
    waiting = asyncio.create_task(calls.offer({16: [b"a"]}))
    while not sent:
        await asyncio.sleep(0)
    ledger.on_answer(PrefixOffered(sent[0].call_id + 1, "", 0))
    ledger.on_dead("it died")
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await calls.offer({16: [b"a"]})


@pytest.mark.parametrize(
    "text", ["", "a:1", "router/a:1", "prefill/a", "prefill/a b:1", "decode/:1"]
)
def test_what_names_nobody_is_nothing(text: str) -> None:
    assert PrefixHolder.parse(text) is None and checked_holder(text) == ""


def test_holders_are_named_by_role_and_address() -> None:
    assert PrefixHolder.parse("decode/[::1]:80") == PrefixHolder(True, "[::1]:80")
    assert checked_holder("prefill/node-1.pods:8200") == "prefill/node-1.pods:8200"


def test_an_engine_that_gives_no_answer_is_named_before_a_router_gives_the_node_up() -> None:
    assert prefix_calls._TIMEOUT_S < named_node.TIMEOUT_S - 1
