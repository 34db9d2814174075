"""Raw TCP between two processes: what the KV data plane is measured against.

The sender slices a memory file, the receiver reads every chunk straight into its own place of
another (`recv_into`); one thread and one connection for each stream, no checksum. Streams are dealt
out to as many processes a side as asked for.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from host.memory_file import MemoryFile

_REQUEST = struct.Struct("<QQQQ")
"""Stream, streams, chunk bytes, total bytes."""
_HEADER = struct.Struct("<QQ")
"""Offset at the receiver, payload bytes."""


class RawTcp:
    """All processes of both sides, started afresh; `run` moves everything once. Raises `EOFError`
    where one has ended."""

    def __init__(
        self,
        source: MemoryFile,
        target: MemoryFile,
        num_streams: int,
        chunk_bytes: int,
        num_processes: int = 1,
    ) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._receivers: list[Connection] = []
        for process in range(min(num_processes, num_streams)):
            address = self._start(_serve, source).recv()
            streams = list(range(process, num_streams, num_processes))
            share = streams, num_streams, chunk_bytes
            self._receivers.append(self._start(_receive_forever, target, address, *share))
            self._receivers[-1].recv()

    def _start(self, run: Callable[..., None], memory: MemoryFile, *given: object) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        args = theirs, memory.pid, memory.fd, *given
        self._processes.append(context.Process(target=run, args=args, daemon=True))
        self._processes[-1].start()
        theirs.close()
        return ours

    @property
    def pids(self) -> tuple[list[int], list[int]]:
        """Returns process ids (of the senders, of the receivers)."""
        pids = [one.pid or 0 for one in self._processes]
        return pids[::2], pids[1::2]

    def run(self) -> None:
        for receiver in self._receivers:
            receiver.send("run")
        for receiver in self._receivers:
            receiver.recv()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def target_offset(index: int, num_chunks: int, chunk_bytes: int) -> int:
    """Returns where chunk `index` goes: not where it came from, and each place once."""
    return (num_chunks - 1 - index) * chunk_bytes


def _receive_exactly(connection: socket.socket, view: memoryview) -> bool:
    """Receives a whole buffer; returns False when the other end has closed."""
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True


def _serve(parent: Connection, pid: int, fd: int) -> None:
    memory = MemoryFile.attach(pid, fd)
    listener = socket.create_server(("127.0.0.1", 0))
    parent.send(listener.getsockname())
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, memory), daemon=True).start()


def _answer(connection: socket.socket, memory: MemoryFile) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = memoryview(memory.buffer)
    request = bytearray(_REQUEST.size)
    while _receive_exactly(connection, memoryview(request)):
        stream, num_streams, chunk, total = _REQUEST.unpack(request)
        num_chunks = total // chunk
        for i in range(stream, num_chunks, num_streams):
            header = _HEADER.pack(target_offset(i, num_chunks, chunk), chunk)
            connection.sendall(header, socket.MSG_MORE)
            connection.sendall(data[i * chunk : (i + 1) * chunk])


def _receive_forever(
    parent: Connection,
    pid: int,
    fd: int,
    address: tuple[str, int],
    streams: list[int],
    num_streams: int,
    chunk_bytes: int,
) -> None:
    """Receives in threads that live as long as the process, so that their CPU time can be read.
    `streams`: of `num_streams`, those of this process."""
    memory = MemoryFile.attach(pid, fd)
    data, num_chunks = memoryview(memory.buffer), memory.size // chunk_bytes
    go, done = (threading.Barrier(len(streams) + 1) for _ in range(2))

    def receive(stream: int, connection: socket.socket) -> None:
        header = bytearray(_HEADER.size)
        request = _REQUEST.pack(stream, num_streams, chunk_bytes, memory.size)
        while True:
            go.wait()
            connection.sendall(request)
            for _ in range(stream, num_chunks, num_streams):
                _receive_exactly(connection, memoryview(header))
                offset, count = _HEADER.unpack(header)
                _receive_exactly(connection, data[offset : offset + count])
            done.wait()

    for stream in streams:
        own = stream, socket.create_connection(address)
        threading.Thread(target=receive, args=own, daemon=True).start()
    parent.send("ready")
    while parent.recv():
        go.wait()
        done.wait()
        parent.send("done")
