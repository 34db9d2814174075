"""kube-proxy: connections to a Service's address go to one of its endpoints.

1. a Service with an address appears: its ports are listened on
2. each connection goes to a ready endpoint, in turn; when there is none, to one that is
   terminating but still serves
3. it stays with its endpoint until one of both ends closes it
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.resources import Object

_CHUNK = 64 << 10


class ServiceProxy:
    """`start` → `close`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._turns = itertools.count()
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="service proxy")

    async def close(self) -> None:
        assert self._watching is not None
        self._watching.cancel()
        for server in self._servers.values():
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(self._watching, *self._connections, return_exceptions=True)

    async def _watch(self) -> None:
        async for event in self._store.events(["Service"]):
            address = event.object["spec"].get("clusterIP", "None")
            if address == "None":
                continue
            for port in event.object["spec"]["ports"]:
                key = (address, port["port"])
                if event.type == "DELETED":
                    if key in self._servers:
                        self._servers.pop(key).close()
                elif key not in self._servers:
                    self._servers[key] = await self._listen(event.object, port, *key)

    async def _listen(
        self, service: Object, port: dict[str, object], address: str, number: int
    ) -> asyncio.Server:
        meta, name = service["metadata"], port.get("name", "")

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                target = self._choose(meta["namespace"], meta["name"], str(name))
                await _join(reader, writer, target)
            finally:
                self._connections.discard(task)
                writer.close()

        return await asyncio.start_server(connect, address, number)

    def _choose(self, namespace: str, name: str, port_name: str) -> tuple[str, int] | None:
        ready, draining = [], []
        for slice_ in self._store.list_kind("EndpointSlice", namespace):
            if slice_["metadata"]["labels"].get("kubernetes.io/service-name") != name:
                continue
            port = next(p["port"] for p in slice_["ports"] if p["name"] == port_name)
            for endpoint in slice_["endpoints"]:
                conditions = endpoint["conditions"]
                target = (endpoint["addresses"][0], port)
                if conditions["ready"]:
                    ready.append(target)
                elif conditions["serving"] and conditions["terminating"]:
                    draining.append(target)
        targets = ready or draining
        return targets[next(self._turns) % len(targets)] if targets else None


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: tuple[str, int] | None
) -> None:
    """Joins both directions, until both ends have said everything."""
    if target is None:
        return
    try:
        far_reader, far_writer = await asyncio.open_connection(*target)
    except OSError:
        return
    try:
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    finally:
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until `reader` ends, which `writer` is then told."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
