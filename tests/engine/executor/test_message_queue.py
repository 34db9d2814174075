"""The queue between real processes: order, long messages, slow and dead readers, sleep."""

from __future__ import annotations

import hashlib
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.executor.queues.message_queue import MessageQueueReader, MessageQueueWriter
from engine.executor.queues.shm_broadcast import RingError
from host.child_process import ipc_address
from host.sockets.local_socket import bind_socket

READER = Path(__file__).with_name("ring_reader.py")
SLOT_BYTES = 256
NUM_SLOTS = 4
TIMEOUT_MS = 60_000


class ReaderDiedError(Exception):
    """Raised here by the writer's liveness check."""


class Rig:
    """A writer, reader processes, and the socket of their replies."""

    def __init__(self, num_readers: int, delay_s: dict[int, float] | None = None) -> None:
        name = f"test-{secrets.token_hex(6)}"
        self.context = zmq.Context()
        self.replies = bind_socket(self.context, zmq.PULL, ipc_address(name, "replies"))
        self.writer = MessageQueueWriter(
            self.context,
            name,
            [ipc_address(name, f"reader{r}") for r in range(num_readers)],
            self._check_readers,
            num_slots=NUM_SLOTS,
            slot_bytes=SLOT_BYTES,
        )
        self.readers = [
            self._start(r, ipc_address(name, "replies"), (delay_s or {}).get(r, 0.0))
            for r in range(num_readers)
        ]

    def _start(self, reader: int, reply_address: str, delay_s: float) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(READER)], stdin=subprocess.PIPE)
        assert process.stdin is not None
        config = {
            "handle": self.writer.handle,
            "reader": reader,
            "reply_address": reply_address,
            "delay_s": delay_s,
        }
        process.stdin.write(b"%d\n" % _own_pid() + msgspec.json.encode(config))
        process.stdin.close()
        return process

    def _check_readers(self) -> None:
        if any(reader.poll() is not None for reader in self.readers):
            raise ReaderDiedError

    def receive(self) -> tuple[int, bytes, float, float]:
        """Returns (reader, digest, received at, CPU seconds of the reader)."""
        assert self.replies.poll(TIMEOUT_MS), "no reader answered"
        return msgspec.msgpack.decode(self.replies.recv(), type=tuple[int, bytes, float, float])

    def end(self) -> list[int]:
        self.writer.enqueue(b"end")
        return [reader.wait(60) for reader in self.readers]

    def close(self) -> None:
        for reader in self.readers:
            reader.kill()
            reader.wait()
        self.writer.close()
        self.context.destroy(linger=0)


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name)


@pytest.fixture
def two_readers() -> Iterator[Rig]:
    rig = Rig(2)
    yield rig
    rig.close()


def _exchange(rig: Rig, messages: list[bytes]) -> list[list[bytes]]:
    """Digests by reader, while the writer runs as fast as it may."""
    writing = threading.Thread(target=lambda: [rig.writer.enqueue(m) for m in messages])
    writing.start()
    seen: list[list[bytes]] = [[] for _ in rig.readers]
    for _ in range(len(messages) * len(rig.readers)):
        reader, digest, _, _ = rig.receive()
        seen[reader].append(digest)
    writing.join(60)
    return seen


def _digests(messages: list[bytes]) -> list[bytes]:
    return [hashlib.sha256(m).digest() for m in messages]


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(st.sampled_from([0, 1, 255, 256, 257, 5000, 300_000]), max_size=24))
def test_all_sizes_arrive_in_order_at_every_reader(two_readers: Rig, sizes: list[int]) -> None:
    messages = [secrets.token_bytes(size) for size in sizes]
    assert _exchange(two_readers, messages) == [_digests(messages)] * 2


def test_stress(two_readers: Rig) -> None:
    draw = random.Random(7)
    messages = [draw.randbytes(int(draw.paretovariate(0.6) * 8) % 2000) for _ in range(3000)]
    assert any(len(m) > SLOT_BYTES for m in messages)
    assert _exchange(two_readers, messages) == [_digests(messages)] * 2
    assert two_readers.end() == [0, 0]


def test_slow_reader_holds_the_writer_back_and_loses_nothing() -> None:
    rig = Rig(2, delay_s={1: 0.02})
    try:
        messages = [secrets.token_bytes(draw) for draw in (10, 400) * 10]
        writing = threading.Thread(target=lambda: [rig.writer.enqueue(m) for m in messages])
        writing.start()
        replies = [rig.receive() for _ in range(len(messages) * 2)]
        writing.join(60)
        seen = [[digest for who, digest, _, _ in replies if who == reader] for reader in (0, 1)]
        assert seen == [_digests(messages)] * 2
        in_order = [reader for reader, *_ in sorted(replies, key=lambda reply: reply[2])]
        ahead = max(
            in_order[:count].count(0) - in_order[:count].count(1) for count in range(len(in_order))
        )
        assert ahead <= NUM_SLOTS + 2, "the fast reader got more than the ring may hold"
    finally:
        rig.close()


@pytest.mark.parametrize("size", [10, 5000])
def test_writer_learns_that_a_reader_was_killed(two_readers: Rig, size: int) -> None:
    two_readers.writer.enqueue(b"first")
    assert {two_readers.receive()[0] for _ in range(2)} == {0, 1}
    two_readers.readers[1].send_signal(signal.SIGKILL)
    two_readers.readers[1].wait()
    with pytest.raises(ReaderDiedError):
        for _ in range(NUM_SLOTS + 1):
            two_readers.writer.enqueue(b"x" * size)


def test_sleeping_readers_use_no_cpu(two_readers: Rig) -> None:
    """A reader waits two seconds for the next message and works less than a tenth of it."""
    two_readers.writer.enqueue(b"first")
    before = {reader: cpu for reader, _, _, cpu in (two_readers.receive() for _ in range(2))}
    time.sleep(2)
    two_readers.writer.enqueue(b"second")
    after = {reader: cpu for reader, _, _, cpu in (two_readers.receive() for _ in range(2))}
    assert all(after[r] - before[r] < 0.2 for r in (0, 1)), (before, after)


def test_message_that_was_lost_ends_the_reader() -> None:
    context = zmq.Context()
    address = ipc_address(f"test-{secrets.token_hex(6)}", "reader")
    writer = MessageQueueWriter(context, "test", [address], lambda: None)
    reader = MessageQueueReader(context, writer.handle, 0, lambda: None)
    assert reader.dequeue(timeout_s=0.01) is None
    writer.enqueue(b"one")
    assert reader.dequeue(timeout_s=60) == b"one"
    writer.sequence += 1
    writer.enqueue(b"three")
    with pytest.raises(RingError, match="message 2 was announced and is lost or broken"):
        reader.dequeue(timeout_s=60)
    for end in (reader, writer):
        end.close()
        end.close()
    context.destroy(linger=0)


def test_junk_between_long_messages_is_dropped() -> None:
    context = zmq.Context()
    address = ipc_address(f"test-{secrets.token_hex(6)}", "reader")
    writer = MessageQueueWriter(context, "test", [address], lambda: None, slot_bytes=64)
    reader = MessageQueueReader(context, writer.handle, 0, lambda: None)
    stranger = context.socket(zmq.PUSH)
    stranger.connect(address)
    for junk in (b"", b"y" * 1000, b"junk"):
        stranger.send(junk)
    for message in (b"x" * 1000, b"short", b"z" * 2000):
        writer.enqueue(message)
        assert reader.dequeue(timeout_s=60) == message
    for end in (stranger, reader, writer):
        end.close()
    context.destroy(linger=0)


def test_liveness_is_checked_while_waiting() -> None:
    context = zmq.Context()
    address = ipc_address(f"test-{secrets.token_hex(6)}", "reader")

    def fail() -> None:
        raise ReaderDiedError

    writer = MessageQueueWriter(context, "test", [address], fail, num_slots=1)
    reader = MessageQueueReader(context, writer.handle, 0, fail)
    with pytest.raises(ReaderDiedError):
        reader.dequeue()
    writer.enqueue(b"fills the ring")
    with pytest.raises(ReaderDiedError):
        writer.enqueue(b"does not fit")
    reader.close()
    writer.close()
    context.destroy(linger=0)
