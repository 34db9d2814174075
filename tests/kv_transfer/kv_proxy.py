"""A TCP proxy in front of a producer's transfer process, that damages or stops what it passes on.

Chunks are found by their magic in the bytes towards the puller, so HTTP/2's own frames stay
whole: only what gRPC would hand over as a good message is damaged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from kv_transfer.metadata import KVPeer
from kv_transfer.wire.chunk import MAGIC

_KIND_AT = 5
_PIECE = 1 << 16
_HEAD = 256


class Proxy:
    """`damage(n)` says at which offset the n-th DATA chunk (from 0) is damaged; None: it is not.
    `is_stalled` stops both directions; connections stay open. It becomes so by itself once more
    than `stalls_behind` bytes of a connection have gone to the puller."""

    def __init__(self, damage: Callable[[int], int | None] = lambda n: None) -> None:
        self.num_chunks = 0
        self.is_stalled = False
        self.stalls_behind: float = math.inf
        self._damage = damage
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._target = ""

    async def start(self, peer: KVPeer) -> KVPeer:
        """The peer as seen through the proxy. It must have one process."""
        ((self._target,),) = peer.endpoints
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return KVPeer(
            engine_id=peer.engine_id,
            epoch=peer.epoch,
            layout=peer.layout,
            endpoints=((f"127.0.0.1:{port}",),),
        )

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, up_writer]
        for source, sink, change in (
            (reader, up_writer, bytes),
            (up_reader, writer, self._changed),
        ):
            task = asyncio.create_task(self._pass_on(source, sink, change))
            self._tasks.add(task)

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        change: Callable[[bytes], bytes],
    ) -> None:
        num_passed = 0
        while data := await source.read(_PIECE):
            while _ends_in_the_head_of_a_chunk(data):
                data += await source.read(_PIECE)
            while self.is_stalled:
                await asyncio.sleep(0.01)
            sink.write(change(data))
            num_passed += len(data)
            if change is not bytes and num_passed > self.stalls_behind:
                self.is_stalled, self.stalls_behind = True, math.inf
            await sink.drain()
        sink.close()

    def _changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        at = data.find(MAGIC)
        while at >= 0:
            if at + _KIND_AT < len(data) and data[at + _KIND_AT] == 0:
                offset = self._damage(self.num_chunks)
                self.num_chunks += 1
                if offset is not None and at + offset < len(data):
                    changed[at + offset] ^= 0x10
            at = data.find(MAGIC, at + 1)
        return bytes(changed)


def _ends_in_the_head_of_a_chunk(data: bytes) -> bool:
    """So that a chunk's header and the first bytes of its payload can be changed in one piece."""
    at = data.rfind(MAGIC)
    return at >= 0 and len(data) < at + _HEAD and data[at + _KIND_AT : at + _KIND_AT + 1] == b"\0"
