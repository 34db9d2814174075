"""The queue over TCP: order, slow readers, lost messages, and who may take part."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq

from engine.executor.queues.remote_queue import (
    LostMessageError,
    RemoteQueueReader,
    RemoteQueueWriter,
)
from host.sockets.secure_socket import LinkKey, new_socket

HOST = "127.0.0.7"
MAX_UNREAD = 4
TIMEOUT_S = 60


class GoneError(Exception):
    """Raised here by liveness checks."""


def gone() -> None:
    raise GoneError


class Rig:
    """A writer and its readers."""

    def __init__(self, num_readers: int) -> None:
        self.context = zmq.Context()
        self.key = LinkKey.create()
        self.writer = RemoteQueueWriter(
            self.context, HOST, self.key, num_readers, lambda: None, max_unread=MAX_UNREAD
        )
        self.readers = [
            RemoteQueueReader(self.context, self.writer.handle, reader, lambda: None)
            for reader in range(num_readers)
        ]

    def close(self) -> None:
        for end in (*self.readers, self.writer):
            end.close()
            end.close()
        self.context.destroy(linger=0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(2)
    yield rig
    rig.close()


def test_every_reader_sees_every_message_in_order(rig: Rig) -> None:
    messages = [secrets.token_bytes(size) for size in (0, 1, 100, 3_000_000, 7, 0)] * 5
    writing = threading.Thread(target=lambda: [rig.writer.enqueue(m) for m in messages])
    writing.start()
    for message in messages:
        assert [reader.dequeue(TIMEOUT_S) for reader in rig.readers] == [message] * 2
    writing.join(TIMEOUT_S)
    assert rig.readers[0].dequeue(timeout_s=0.01) is None


def test_the_slowest_reader_holds_the_writer_back(rig: Rig) -> None:
    for number in range(MAX_UNREAD):
        rig.writer.enqueue(b"%d" % number)
    writing = threading.Thread(target=lambda: [rig.writer.enqueue(b"%d" % n) for n in range(4, 8)])
    writing.start()
    seen = [rig.readers[0].dequeue(TIMEOUT_S) for _ in range(MAX_UNREAD)]
    assert rig.readers[0].dequeue(timeout_s=0.05) is None, "the other one has taken nothing"
    for _ in range(MAX_UNREAD):
        assert rig.readers[1].dequeue(TIMEOUT_S) is not None
        seen.append(rig.readers[0].dequeue(TIMEOUT_S))
    writing.join(TIMEOUT_S)
    assert seen == [b"%d" % number for number in range(2 * MAX_UNREAD)]
    assert rig.writer.num_unread(1) == MAX_UNREAD


def test_who_has_not_taken_a_message_is_known(rig: Rig) -> None:
    rig.writer.enqueue(b"one")
    assert [rig.writer.num_unread(reader) for reader in (0, 1)] == [1, 1]
    rig.readers[0].dequeue(TIMEOUT_S)
    rig.readers[1].dequeue(TIMEOUT_S)
    rig.writer.enqueue(b"two")
    rig.readers[1].dequeue(TIMEOUT_S)
    rig.writer.enqueue(b"three")
    rig.readers[1].dequeue(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while rig.writer.num_unread(1) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [rig.writer.num_unread(reader) for reader in (0, 1)] == [2, 0]


def test_a_lost_message_ends_the_reader(rig: Rig) -> None:
    rig.writer.enqueue(b"one")
    rig.writer.sequence += 1
    rig.writer.enqueue(b"three")
    assert rig.readers[0].dequeue(TIMEOUT_S) == b"one"
    with pytest.raises(LostMessageError, match="expected message 2, found 3"):
        rig.readers[0].dequeue(TIMEOUT_S)


def test_liveness_is_checked_while_waiting() -> None:
    with zmq.Context() as context:
        writer = RemoteQueueWriter(context, HOST, LinkKey.create(), 1, gone)
        reader = RemoteQueueReader(context, writer.handle, 0, gone)
        with pytest.raises(GoneError):
            reader.dequeue()
        reader.close()
        writer.close()
        lonely = RemoteQueueWriter(context, HOST, LinkKey.create(), 1, gone)
        with pytest.raises(GoneError):
            lonely.enqueue(b"nobody has joined")
        lonely.close()


@pytest.mark.parametrize("mechanism", ["another key", "no key"])
def test_strangers_hear_nothing_and_are_not_heard(rig: Rig, mechanism: str) -> None:
    """A stranger takes the name of a reader before it has come."""
    writer = RemoteQueueWriter(rig.context, HOST, rig.key, 1, lambda: None)
    address = writer.handle.address
    stranger = new_socket(rig.context, zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"reader 0")
    if mechanism == "another key":
        key = LinkKey.create()
        stranger.setsockopt_string(zmq.CURVE_SERVERKEY, key.public)
        stranger.setsockopt_string(zmq.CURVE_PUBLICKEY, key.public)
        stranger.setsockopt_string(zmq.CURVE_SECRETKEY, key.secret)
    # Before it connects: what has happened by then would not be told.
    refused = stranger.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_DISCONNECTED
    )
    stranger.connect(address)
    stranger.send(bytes(8))
    assert refused.poll(TIMEOUT_S * 1000), "the stranger was let in"
    reader = RemoteQueueReader(rig.context, writer.handle, 0, lambda: None)
    writer.enqueue(b"secret")
    assert reader.dequeue(TIMEOUT_S) == b"secret"
    assert not stranger.poll(50)
    stranger.disable_monitor()
    for socket in (stranger, reader, writer):
        socket.close()


def test_it_listens_on_the_named_address_only(rig: Rig) -> None:
    port = int(rig.writer.handle.address.rpartition(":")[2])
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert listening == {HOST}


def test_keys_do_not_show() -> None:
    key = LinkKey.create()
    assert key.secret not in repr(key) and key.public not in repr(key)
