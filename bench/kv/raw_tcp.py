"""Raw TCP between two processes: what the KV data plane is measured against.

The sender slices a memory file, the receiver reads every chunk straight into its own place of
another (`recv_into`); one thread and one connection for each stream, no checksum. Streams are dealt
out to as many processes a side as asked for. Each process is `python -m bench.kv.raw_tcp`; its
orders come as lines on standard input.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading

import msgspec

from host.memory_file import MemoryFile

_REQUEST = struct.Struct("<QQQQ")
"""Stream, streams, chunk bytes, total bytes."""
_HEADER = struct.Struct("<QQ")
"""Offset at the receiver, payload bytes."""


class EndConfig(msgspec.Struct):
    """One end of one pair. `address` None: listen. `pid`, `fd`: the memory file to send from or
    write to. `streams`: of `num_streams`, those that this pair carries."""

    pid: int
    fd: int
    streams: list[int]
    num_streams: int
    chunk_bytes: int
    address: tuple[str, int] | None = None


class RawTcp:
    """All processes of both sides, started afresh; `run` moves everything once."""

    def __init__(
        self,
        source: MemoryFile,
        target: MemoryFile,
        num_streams: int,
        chunk_bytes: int,
        num_processes: int = 1,
    ) -> None:
        self._senders: list[subprocess.Popen[bytes]] = []
        self._receivers: list[subprocess.Popen[bytes]] = []
        for process in range(min(num_processes, num_streams)):
            streams = list(range(process, num_streams, num_processes))
            sending = EndConfig(source.pid, source.fd, streams, num_streams, chunk_bytes)
            sender = _start(sending)
            self._senders.append(sender)
            address = msgspec.json.decode(_read_line(sender), type=tuple[str, int])
            receiving = EndConfig(target.pid, target.fd, streams, num_streams, chunk_bytes, address)
            self._receivers.append(_start(receiving))
            _read_line(self._receivers[-1])

    @property
    def pids(self) -> tuple[list[int], list[int]]:
        """Returns process ids (of the senders, of the receivers)."""
        return [one.pid for one in self._senders], [one.pid for one in self._receivers]

    def run(self) -> None:
        for receiver in self._receivers:
            assert receiver.stdin is not None
            receiver.stdin.write(b"run\n")
            receiver.stdin.flush()
        for receiver in self._receivers:
            _read_line(receiver)

    def close(self) -> None:
        for process in (*self._receivers, *self._senders):
            process.kill()
            process.wait()


def target_offset(index: int, num_chunks: int, chunk_bytes: int) -> int:
    """Returns where chunk `index` goes: not where it came from, and each place once."""
    return (num_chunks - 1 - index) * chunk_bytes


def _start(config: EndConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.kv.raw_tcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    return process


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("an end of the raw TCP measurement has died")
    return line


def _receive_exactly(connection: socket.socket, view: memoryview) -> bool:
    """Receives a whole buffer; returns False when the other end has closed."""
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True


def _serve(memory: MemoryFile) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    sys.stdout.buffer.write(msgspec.json.encode((host, port)) + b"\n")
    sys.stdout.flush()
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


def _receive_forever(memory: MemoryFile, config: EndConfig) -> None:
    assert config.address is not None
    connections = {stream: socket.create_connection(config.address) for stream in config.streams}
    data = memoryview(memory.buffer)
    total = memory.size

    num_chunks = total // config.chunk_bytes
    go, done = (threading.Barrier(len(config.streams) + 1) for _ in range(2))

    def receive(stream: int) -> None:
        """Receives in threads that live as long as the process, so that their CPU time can
        be read.
        """
        connection = connections[stream]
        header = bytearray(_HEADER.size)
        request = _REQUEST.pack(stream, config.num_streams, config.chunk_bytes, total)
        while True:
            go.wait()
            connection.sendall(request)
            for _ in range(stream, num_chunks, config.num_streams):
                _receive_exactly(connection, memoryview(header))
                offset, count = _HEADER.unpack(header)
                _receive_exactly(connection, data[offset : offset + count])
            done.wait()

    for stream in config.streams:
        threading.Thread(target=receive, args=(stream,), daemon=True).start()
    print("ready", flush=True)
    for _ in sys.stdin:
        go.wait()
        done.wait()
        print("done", flush=True)


def main() -> None:
    config = msgspec.json.decode(sys.stdin.readline(), type=EndConfig)
    memory = MemoryFile.attach(config.pid, config.fd)
    if config.address is None:
        _serve(memory)
    else:
        _receive_forever(memory, config)


if __name__ == "__main__":
    main()
