"""A decode node that the network cuts off in the middle of its answers, and gives back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import grpc
import pytest
from aiohttp import web

from tests.network_namespaces import Switch, switched
from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter
from tests.router.fakes import FakeDecodeNode
from tests.router.token_server import TokenHandler, expected, texts

NUM_STREAMS = 8


@pytest.fixture
def switch() -> Iterator[Switch]:
    with switched("a", "b") as switch:
        yield switch


class RemoteDecodeNode(FakeDecodeNode):
    """Listens on a host of the switch."""

    def __init__(self, switch: Switch, name: str) -> None:
        super().__init__(name, TokenHandler(gap_s=0.03))
        self._switch = switch
        self._name = name
        self.host = switch.addresses[name]

    def _listen_status(self, server: grpc.aio.Server) -> int:
        with self._switch.on(self._name):
            return super()._listen_status(server)

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        with self._switch.on(self._name):
            return web.SockSite(runner, socket.create_server((self.host, self.port)))


async def stream(router: RunningRouter, seed: int, begun: asyncio.Semaphore) -> bool:
    """Returns whether all of the answer is right. Releases `begun` at its first event."""
    wish = {"model": "demo", "prompt": "p", "seed": seed, "max_tokens": 20, "stream": True}
    async with router.post(wish) as response:
        first = await response.content.readuntil(b"\n\n")
        begun.release()
        rest = await response.text()
    return texts(first.decode() + rest) == [expected(wish)]


async def run_streams(router: RunningRouter, switch: Switch, cut: str = "") -> list[bool]:
    """Runs streams. `cut` is a host that is cut off when all streams have begun."""
    begun = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(stream(router, seed, begun)) for seed in range(NUM_STREAMS)]
    async with asyncio.timeout(TIMEOUT_S):
        for _ in tasks:
            await begun.acquire()
        if cut:
            switch.cut(cut)
        return await asyncio.gather(*tasks)


async def test_a_node_cut_off_mid_stream_costs_no_token_and_comes_back(
    switch: Switch, cluster: Cluster
) -> None:
    nodes = [await cluster._start(RemoteDecodeNode(switch, name)) for name in ("a", "b")]
    router = await cluster.router(
        *nodes,
        stream_stall_s=1.5,
        stale_after_s=0.5,
        down_after_s=1.0,
        no_node_wait_s=TIMEOUT_S,
        allow_plaintext=True,
    )
    assert await run_streams(router, switch, cut="a") == [True] * NUM_STREAMS
    assert router.metric("tandem_router_migrations_total", reason="lost") > 0
    await router.wait_usable(decode=1, prefill=0)
    switch.mend("a")
    await router.wait_usable(decode=2, prefill=0)
    assert await run_streams(router, switch) == [True] * NUM_STREAMS
