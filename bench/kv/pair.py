"""One prefill and one decode connector with real transfer processes, and the caches between them.

1. `Caches(layout, tokens, gpus)`: source and destination, in host memory or on GPUs
2. `KVPair(caches, case)` starts the transfer processes of both sides
3. `run` moves the KV of one prompt; `caches.check_kv` compares every byte; `settle`
4. `close`

`RawTcp` is what the KV data plane is measured against: the sender slices a memory file, the
receiver reads every chunk straight into its own place of another (`recv_into`); one thread and one
connection for each stream, no checksum. Streams are dealt out to as many processes a side as asked
for.
"""

from __future__ import annotations

import multiprocessing
import random
import select
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from msgspec.structs import replace

from host.memory_file import MemoryFile
from kv_transfer.base import KVCacheHandle, KVConnectorScheduler
from kv_transfer.config import KVRole, KVTransferConfig, PullTransportName
from kv_transfer.factory import create_scheduler_connector
from kv_transfer.layout import BlockIds, KVLayout, attention_group
from kv_transfer.memory.devices.cache_handle import handle_of_tensor
from kv_transfer.metadata import KVTransferParams, TransferStats
from kv_transfer.producer.layer_marks import LayerMarks

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


_PATTERN = 0x7F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement. `limit_s`: of one transfer."""

    transport: PullTransportName
    streams: int
    processes: int
    chunk_bytes: int
    block_size: int
    tokens: int
    staging_bytes: int = 512 << 20
    data: str = "stream"
    limit_s: float = 60.0
    receive_threads: int = 0


def llama_8b(block_size: int) -> KVLayout:
    group = attention_group(
        layers=range(32), heads=8, head_dim=128, dtype="bfloat16", block_size=block_size
    )
    return KVLayout(groups=(group,), tp_size=1, model_hash="bench")


@dataclass(slots=True)
class Prompt:
    """All that a connector reads of a request."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: KVTransferParams | None


@dataclass(slots=True)
class PromptChunk:
    """One step that computes the whole prompt."""

    request: Prompt
    first_token: int
    num_tokens: int
    block_ids: BlockIds


class Caches:
    """Source and destination of one prompt's KV: memory files, or one tensor on each of two GPUs,
    which may be the same. Raw TCP moves the bytes of such files."""

    def __init__(self, layout: KVLayout, num_tokens: int, gpus: tuple[int, int] | None) -> None:
        self.layout = layout
        self.num_tokens = num_tokens
        self.num_blocks = layout.groups[0].num_blocks_for(num_tokens)
        self.num_bytes = self.num_blocks * layout.block_bytes
        self.marks = LayerMarks.create(layout.num_layers)
        self.source_blocks = list(range(self.num_blocks))
        self.target_blocks = list(range(self.num_blocks))
        random.Random(0).shuffle(self.target_blocks)
        self.files: list[MemoryFile] = []
        """Source and destination in host memory."""
        if gpus is None:
            self.files = [MemoryFile.create(f"bench-{i}", self.num_bytes) for i in range(2)]
            flat = [torch.from_numpy(np.frombuffer(one.buffer, np.int64)) for one in self.files]
        else:
            words = self.num_bytes // 8
            flat = [torch.zeros(words, dtype=torch.int64, device=f"cuda:{gpu}") for gpu in gpus]
        shape = layout.num_layers, self.num_blocks, -1
        self._tensors = [one.view(shape) for one in flat]
        torch.arange(flat[0].numel(), out=flat[0]).mul_(_PATTERN)
        self._synchronize()

    def handle(self, is_source: bool) -> KVCacheHandle:
        """Returns the handle by which transfer processes map it."""
        tensor = self._tensors[0 if is_source else 1]
        with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
            return replace(handle_of_tensor(0, self.layout, tensor), marks_fd=self.marks.fd)

    def clear(self) -> None:
        """Clears the destination."""
        self._tensors[1].zero_()
        self._synchronize()

    def check_kv(self) -> None:
        source, target = self._tensors
        if not torch.equal(target[:, self.target_blocks].to(source.device), source):
            raise SystemExit("the KV that arrived is not the KV that was sent")

    def check_raw(self, chunk_bytes: int) -> None:
        num_chunks = self.num_bytes // chunk_bytes
        last = target_offset(0, num_chunks, chunk_bytes) // 8 + chunk_bytes // 8
        source, target = (one.view(-1)[:last].view(num_chunks, -1) for one in self._tensors)
        if not torch.equal(target, source.flip(0)):
            raise SystemExit("the bytes that arrived are not the bytes that were sent")

    def close(self) -> None:
        """Closes the caches, which nothing maps any more. Kept memory of a GPU could put the next
        two into one allocation."""
        self.marks.close()
        self._tensors.clear()
        for file in self.files:
            file.close()
        if not self.files:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        for tensor in self._tensors:
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)


class KVPair:
    """Both connectors, each with transfer processes of its own."""

    def __init__(self, caches: Caches, case: Case) -> None:
        self.caches = caches
        self._limit_s = case.limit_s
        self._producer = _connector("kv_producer", caches, case)
        self._consumer = _connector("kv_consumer", caches, case)
        self._poller = select.poll()
        for connector in (self._producer, self._consumer):
            self._poller.register(connector.fileno(), select.POLLIN)
        self._steps = 0
        self._transfer_id = ""
        self._received: dict[str, TransferStats] = {}
        self._released: list[str] = []

    @property
    def pids(self) -> tuple[list[int], list[int]]:
        """Returns process ids (of the prefill side, of the decode side)."""
        return self._producer.process_pids, self._consumer.process_pids

    def run(self) -> None:
        """Runs until everything has arrived. Raises SystemExit when that takes too long."""
        latest = time.monotonic() + self._limit_s
        caches, num_tokens = self.caches, self.caches.num_tokens
        self._transfer_id = transfer_id = uuid.uuid4().hex
        export = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
        request = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, peer=self._producer.peer_info
        )
        sent = Prompt("prefill", num_tokens, export)
        self._steps += 1
        self._producer.update_state_after_alloc(sent, (), 0)
        self._consumer.update_state_after_alloc(
            Prompt("decode", num_tokens, request), (caches.target_blocks,), num_tokens
        )
        self._producer.build_connector_meta(
            self._steps, [PromptChunk(sent, 0, num_tokens, (caches.source_blocks,))]
        )
        self._producer.request_finished(sent)
        while transfer_id not in self._received:
            self._poll()
            if time.monotonic() > latest:
                raise SystemExit(
                    f"{caches.num_bytes} bytes did not arrive within {self._limit_s:g} s "
                    f"(--limit-s); the transfer processes are {self.pids}"
                )

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the last `run` took."""
        return self._received[self._transfer_id].num_bytes

    def settle(self) -> None:
        """Waits until the prefill side has released it."""
        while self._transfer_id not in self._released:
            self._poll()

    def close(self) -> None:
        self._producer.shutdown()
        self._consumer.shutdown()

    def _poll(self) -> None:
        self._poller.poll(1000)
        for connector in (self._consumer, self._producer):
            output = connector.get_finished()
            if output is not None:
                if output.failed:
                    raise SystemExit(f"a transfer failed: {output.failed}")
                for name in output.finished_recving:
                    self._received[name.transfer_id] = output.stats[name]
                self._released += [name.transfer_id for name in output.released]


def _connector(role: KVRole, caches: Caches, case: Case) -> KVConnectorScheduler:
    config = KVTransferConfig(
        kv_role=role,
        num_processes=case.processes,
        num_streams=case.streams,
        receive_threads=case.receive_threads,
        chunk_bytes=case.chunk_bytes,
        staging_bytes=case.staging_bytes,
        pull_transport=case.transport,
        transports=case.data,
    )
    engine_id = f"bench-{uuid.uuid4().hex[:12]}"
    handle = caches.handle(role == "kv_producer")
    return create_scheduler_connector(config, engine_id, 1, caches.layout, [handle])
