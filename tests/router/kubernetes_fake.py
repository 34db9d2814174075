"""An API server that serves EndpointSlices of one service, as a test tells it to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from cli.local_cluster.cluster import free_ports

PATH = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


def a_slice(name: str, *endpoints: dict[str, Any], version: int = 1) -> dict[str, Any]:
    metadata = {"name": name, "resourceVersion": str(version), "labels": {"any": "thing"}}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": list(endpoints)}


class FakeApi:
    """`items` is what a list gives; `send` goes to the open watches. `requests`: their queries."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = 1
        self.status = 200
        self.expired = False
        self.requests: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.watches: set[web.StreamResponse] = set()
        self.ports: list[int] = []
        """Says where requests have come from."""
        self.url = ""
        self._runner: web.AppRunner | None = None
        [self._port] = free_ports(1)

    @property
    def num_lists(self) -> int:
        return sum("watch" not in query for query in self.requests)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await self._site(self._runner).start()
        self.url = f"http://{self.host}:{self._port}"

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        return web.TCPSite(runner, self.host, self._port, reuse_address=True)

    async def stop(self) -> None:
        if self._runner is not None:
            self.end_watches()
            await self._runner.cleanup()
            self._runner = None

    def end_watches(self) -> None:
        """As the API does every few minutes."""
        self.watches.clear()

    async def send(self, kind: str, item: dict[str, Any], *, in_pieces: bool = False) -> None:
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        for watch in list(self.watches):
            for part in (line[:30], line[30:]) if in_pieces else (line,):
                await watch.write(part)
                await asyncio.sleep(0)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        self.requests.append(query)
        self.tokens.append(request.headers.get("authorization", ""))
        if self.status != 200:
            return web.Response(status=self.status)
        if "watch" not in query:
            listed = {"metadata": {"resourceVersion": str(self.version)}, "items": self.items}
            return web.json_response(listed)
        if self.expired:
            self.expired = False
            return web.Response(status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches.add(response)
        try:
            while response in self.watches:
                await asyncio.sleep(0.01)
        finally:
            self.watches.discard(response)
        return response
