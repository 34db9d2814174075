"""A router on a real socket, and nodes for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from router.config import RouterSettings
from router.make_services import OuterWorld, Services
from router.nodes.address import NodeRole
from router.server import RouterServer, bind
from tests.awaited import until as eventually
from tests.router.fakes import FakeDecodeNode, FakeNode, FakePrefillNode

TIMEOUT_S = 60.0


@dataclass
class RunningRouter:
    url: str
    server: RouterServer
    services: Services
    client: aiohttp.ClientSession

    def post(self, body: object, *, path: str = "/v1/completions", **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(self.url + path, json=body, headers=named)

    async def text(self, body: object, **headers: str) -> str:
        async with self.post(body, **headers) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    def metric(self, name: str, **labels: str) -> float:
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0

    async def wait_usable(self, *, decode: int, prefill: int) -> None:
        def enough() -> bool:
            registry = self.services.registry
            return (
                len(registry.usable(NodeRole.DECODE)) == decode
                and len(registry.usable(NodeRole.PREFILL)) == prefill
            )

        await eventually(enough)

    @property
    def num_open(self) -> float:
        return self.metric("tandem_router_open_requests")

    def assert_empty(self) -> None:
        """Checks that nothing of any request is left."""
        assert self.num_open == 0
        for node in self.services.registry.all_nodes():
            assert (node.work.num_requests, node.work.num_tokens) == (0, 0), node.address


@dataclass
class Cluster:
    """Starts nodes and routers; everything is stopped and checked at the end of the test."""

    stack: contextlib.AsyncExitStack

    async def prefill(self, node_id: str = "p") -> FakePrefillNode:
        return await self._start(FakePrefillNode(node_id))

    async def decode(
        self, node_id: str = "d", handler: Callable[..., Awaitable[Any]] | None = None
    ) -> FakeDecodeNode:
        return await self._start(FakeDecodeNode(node_id, handler))

    async def _start(self, node: Any) -> Any:
        await node.start()
        self.stack.push_async_callback(node.stop)
        return node

    async def router(
        self, *nodes: FakeNode, world: OuterWorld | None = None, **settings: Any
    ) -> RunningRouter:
        prefills = [node.entry for node in nodes if isinstance(node, FakePrefillNode)]
        decodes = [node.entry for node in nodes if isinstance(node, FakeDecodeNode)]
        settings.setdefault("no_node_wait_s", 0.0)
        settings.setdefault("prefill", ",".join(prefills))
        settings.setdefault("decode", ",".join(decodes))
        running = await self.stack.enter_async_context(
            run_router(RouterSettings(port=0, **settings), world)
        )
        if nodes:
            await running.wait_usable(decode=len(decodes), prefill=len(prefills))
        return running


@contextlib.asynccontextmanager
async def run_router(
    settings: RouterSettings, world: OuterWorld | None = None
) -> AsyncIterator[RunningRouter]:
    listener = bind(settings.host, settings.port)
    server = RouterServer(settings, listener, world)
    url = "http://{}:{}".format(*listener.getsockname())
    serving = asyncio.create_task(server.run_until_drained())
    await eventually(lambda: server.started or serving.done())
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        running = RunningRouter(url, server, server.services, client)
        try:
            yield running
            await eventually(lambda: running.num_open == 0)
            running.assert_empty()
        finally:
            await client.close()
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def run_cluster() -> AsyncIterator[Cluster]:
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        yield Cluster(stack)
    await eventually(lambda: not _left_over(before))


def _left_over(before: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Tasks of the router that are still there."""
    tasks = asyncio.all_tasks() - before
    return [task for task in tasks if "router" in str(task.get_coro())]
