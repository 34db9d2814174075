"""Raw TCP between two processes: what the KV data plane is measured against.

The sender slices a memory file, the receiver reads every chunk straight into its own place of
another (`recv_into`); one thread and one connection for each stream, no checksum. Each end is
`python -m bench.raw_tcp`, its orders come as lines on standard input.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading

import msgspec

from kv_transfer.host.memory_file import MemoryFile

_REQUEST = struct.Struct("<QQQQ")
"""Stream, streams, chunk bytes, total bytes."""
_HEADER = struct.Struct("<QQ")
"""Offset at the receiver, payload bytes."""


class EndConfig(msgspec.Struct):
    """One end. `address` None: listen. `pid`, `fd`: the memory file to send from or write to."""

    pid: int
    fd: int
    num_streams: int
    chunk_bytes: int
    address: tuple[str, int] | None = None


class RawTcp:
    """Both ends, started afresh; `run` moves everything once."""

    def __init__(
        self, source: MemoryFile, target: MemoryFile, num_streams: int, chunk_bytes: int
    ) -> None:
        sending = EndConfig(source.pid, source.fd, num_streams, chunk_bytes)
        self._sender = _start(sending)
        host, port = msgspec.json.decode(_read_line(self._sender), type=tuple[str, int])
        receiving = EndConfig(target.pid, target.fd, num_streams, chunk_bytes, (host, port))
        self._receiver = _start(receiving)
        _read_line(self._receiver)

    @property
    def pids(self) -> tuple[int, int]:
        """(sender, receiver)."""
        return self._sender.pid, self._receiver.pid

    def run(self) -> None:
        assert self._receiver.stdin is not None
        self._receiver.stdin.write(b"run\n")
        self._receiver.stdin.flush()
        _read_line(self._receiver)

    def close(self) -> None:
        for process in (self._receiver, self._sender):
            process.kill()
            process.wait()


def target_offset(index: int, num_chunks: int, chunk_bytes: int) -> int:
    """Where chunk `index` goes: not where it came from, and each place once."""
    return (num_chunks - 1 - index) * chunk_bytes


def _start(config: EndConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.raw_tcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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
    """False when the other end has closed."""
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
    connections = [socket.create_connection(config.address) for _ in range(config.num_streams)]
    data = memoryview(memory.buffer)
    total = memory.size

    num_chunks = total // config.chunk_bytes
    go, done = threading.Barrier(config.num_streams + 1), threading.Barrier(config.num_streams + 1)

    def receive(stream: int) -> None:
        """The threads live as long as the process, so that their CPU time can be read."""
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

    for stream in range(config.num_streams):
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
