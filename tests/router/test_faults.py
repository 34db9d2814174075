"""Routers and nodes as real processes that are killed, frozen, cut off and rolled under load: every
client gets exactly the answer of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from cli.local_cluster.cluster import free_ports
from tests.router.cluster import TIMEOUT_S, Cluster, eventually
from tests.router.fakes import FakeDecodeNode, stream_forever
from tests.router.fault_proxy import FaultProxy
from tests.router.processes import TokenProcess, ready_line, router_process
from tests.router.token_server import TokenHandler, expected, texts

PATIENCE = ("--stream-stall-s", "1.5", "--stale-after-s", "1", "--down-after-s", "2")


def body(i: int, count: int = 40) -> dict[str, Any]:
    return {
        "model": "demo", "prompt": f"request {i}", "seed": i, "max_tokens": count,
        "stream": i % 5 != 0,
    }  # fmt: skip


class Load:
    """Keeps `num_streams` answers going; notes each that is not exactly right."""

    def __init__(self, client: aiohttp.ClientSession, urls: list[str], count: int = 40) -> None:
        self._client = client
        self._urls = urls
        self._count = count
        self.num_right = 0
        self.num_open = 0
        self.wrong: list[str] = []
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, num_streams: int) -> None:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(num_streams)]

    async def stop(self) -> None:
        self._stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*self._tasks)

    async def reached(self, num_right: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_right < num_right and not self.wrong:
                await asyncio.sleep(0.02)

    async def _run(self, worker: int) -> None:
        serial = worker
        while not self._stop.is_set():
            wish = body(serial, self._count)
            self.num_open += 1
            try:
                found = await self._ask(wish)
            except (aiohttp.ClientError, AssertionError) as error:
                found = repr(error)
            self.num_open -= 1
            if found == expected(wish):
                self.num_right += 1
            else:
                self.wrong.append(found[-300:])
                return
            serial += 1000

    async def _ask(self, wish: dict[str, Any]) -> str:
        while True:
            url = await self._ready_url()
            # Whoever was slow to come finds the door shut, and has lost nothing.
            with contextlib.suppress(aiohttp.ClientConnectorError):
                return await self._answer(url, wish)

    async def _answer(self, url: str, wish: dict[str, Any]) -> str:
        async with self._client.post(f"{url}/v1/completions", json=wish) as response:
            text = await response.text()
            assert response.status == 200, text
            if wish["stream"]:
                return texts(text)[0]
            return str((await response.json())["choices"][0]["text"])

    async def _ready_url(self) -> str:
        """As a load balancer would choose."""
        while True:
            for url in self._urls:
                with contextlib.suppress(aiohttp.ClientConnectorError):
                    async with self._client.get(f"{url}/ready") as response:
                        if response.status == 200:
                            return url
            await asyncio.sleep(0.02)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


@pytest.fixture
async def nodes() -> AsyncIterator[list[TokenProcess]]:
    nodes = [TokenProcess(gap_s=0.01) for _ in range(2)]
    try:
        await asyncio.gather(*(node.start() for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            await node.stop()


async def two_nodes(cluster: Cluster) -> list[FakeDecodeNode]:
    """In this process, for tests that do not hurt them."""
    return [await cluster.decode(name, TokenHandler(gap_s=0.01)) for name in ("a", "b")]


def entries(nodes: list[TokenProcess]) -> str:
    return ",".join(node.entry for node in nodes)


async def url_of(process: asyncio.subprocess.Process) -> str:
    return f"http://127.0.0.1:{(await ready_line(process))['port']}"


async def usable(client: aiohttp.ClientSession, url: str, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with client.get(f"{url}/ready") as response:
                if (await response.json())["decode_nodes"] == count:
                    return
            await asyncio.sleep(0.02)


async def test_nodes_that_die_or_freeze_cost_no_token(
    client: aiohttp.ClientSession, nodes: list[TokenProcess]
) -> None:
    async with router_process("--decode", entries(nodes), *PATIENCE) as router:
        url = await url_of(router)
        await usable(client, url, 2)
        load = Load(client, [url])
        load.start(24)
        await load.reached(10)
        nodes[0].signal(signal.SIGKILL)
        await load.reached(40)
        await nodes[0].restart()
        await usable(client, url, 2)
        nodes[1].signal(signal.SIGSTOP)
        await load.reached(load.num_right + 60)
        nodes[1].signal(signal.SIGCONT)
        await load.reached(load.num_right + 30)
        await load.stop()
        assert load.wrong == []


async def test_a_node_that_is_cut_off_costs_no_token(
    client: aiohttp.ClientSession, cluster: Cluster
) -> None:
    """Its connections stay open, and nothing comes through them."""
    first, second = await two_nodes(cluster)
    async with FaultProxy(first.port) as http, FaultProxy(first.status_port) as reports:
        decode = f"127.0.0.1:{http.port}/{reports.port},{second.entry}"
        async with router_process("--decode", decode, *PATIENCE) as router:
            url = await url_of(router)
            await usable(client, url, 2)
            load = Load(client, [url])
            load.start(24)
            await load.reached(10)
            http.cut()
            reports.cut()
            await load.reached(60)
            http.mend()
            reports.mend()
            await load.reached(load.num_right + 30)
            await load.stop()
            assert load.wrong == []


async def test_rolling_the_decode_tier_fails_no_request(
    client: aiohttp.ClientSession, nodes: list[TokenProcess]
) -> None:
    async with router_process("--decode", entries(nodes), *PATIENCE) as router:
        url = await url_of(router)
        await usable(client, url, 2)
        load = Load(client, [url])
        load.start(16)
        for node in nodes:
            await load.reached(load.num_right + 16)
            node.signal(signal.SIGTERM)
            assert node.process is not None
            async with asyncio.timeout(TIMEOUT_S):
                assert await node.process.wait() == 0
            await node.restart()
            await usable(client, url, 2)
        await load.stop()
        assert load.wrong == []


async def test_rolling_the_routers_fails_no_request(
    client: aiohttp.ClientSession, cluster: Cluster
) -> None:
    decode = ",".join(node.entry for node in await two_nodes(cluster))
    args = ("--decode", decode, *PATIENCE, "--drain-delay-s", "0.3")
    async with contextlib.AsyncExitStack() as stack:
        ports = free_ports(2)
        routers = [
            await stack.enter_async_context(router_process(*args, port=port)) for port in ports
        ]
        urls = [await url_of(router) for router in routers]
        for url in urls:
            await usable(client, url, 2)
        load = Load(client, urls)
        load.start(16)
        for port, router in zip(ports, routers, strict=True):
            await load.reached(load.num_right + 16)
            router.send_signal(signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT_S):
                assert await router.wait() == 0
            again = await stack.enter_async_context(router_process(*args, port=port))
            await usable(client, await url_of(again), 2)
        await load.reached(load.num_right + 16)
        await load.stop()
        assert load.wrong == []


async def test_a_client_that_leaves_is_gone_from_the_node_at_once(cluster: Cluster) -> None:
    """One of several, because this machine may be busy."""
    node = await cluster.decode(handler=stream_forever(gap_s=0.005))
    router = await cluster.router(node)
    delays: list[float] = []
    while min(delays, default=1.0) >= 0.1 and sum(delays) < TIMEOUT_S:
        async with router.post({"model": "demo", "prompt": "a", "stream": True}) as response:
            await response.content.readany()
            assert node.num_open == 1
            response.close()
            left_at = time.monotonic()
        await eventually(lambda: node.num_open == 0)
        delays.append(time.monotonic() - left_at)
    assert min(delays) < 0.1, delays
