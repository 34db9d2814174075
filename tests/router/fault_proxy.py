"""A TCP proxy in front of a node: a cable that a test can cut without either end noticing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class FaultProxy:
    """`port` leads to `target_port`. While `is_cut` nothing passes, in either direction, and no
    connection is closed: to both ends the other one is silent."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self._passing = asyncio.Event()
        self._passing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._passing.clear()

    def lose(self) -> None:
        """Lets nothing pass any more on the connections that are there, as a firewall that has
        forgotten them. New ones are well."""
        self._passing.clear()
        self._passing = asyncio.Event()
        self._passing.set()

    async def drop(self) -> None:
        """Ends the connections that are there, as a proxy that starts anew."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def mend(self) -> None:
        self._passing.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.drop()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, here = await asyncio.open_connection("127.0.0.1", self.target_port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, here, self._passing))
                    group.create_task(self._pump(there, writer, self._passing))
            except* OSError:
                pass
            finally:
                here.close()
                writer.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, passing: asyncio.Event
    ) -> None:
        while data := await source.read(1 << 16):
            await passing.wait()
            sink.write(data)
            await sink.drain()
        await passing.wait()
        sink.close()
