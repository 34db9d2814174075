"""Transfer processes that their engine core reaches over TCP only, as on another host."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from kv_caches import layout
from kv_nodes import FakeRequest, KVNode, poll_until, until_empty

from host.process_host import LocalHost
from host.sockets.local_socket import new_socket
from host.sockets.secure_socket import HostLink, LinkKey, connect_secure, listen
from kv_transfer.config import KVRole, KVTransferConfig

CORE, FAR = "127.0.0.5", "127.0.0.6"
NUM_TOKENS = 100


class FarHost(LocalHost):
    """This one, at another address."""

    def __init__(self, key: LinkKey) -> None:
        self.link = HostLink(core_address=CORE, host_address=FAR, key=key)


@contextmanager
def node(role: KVRole, *hosts: LocalHost) -> Iterator[KVNode]:
    config = KVTransferConfig(
        kv_role=role, chunk_bytes=2048, staging_bytes=4 << 20, stall_timeout_s=20.0
    )
    made = KVNode(config, layout(tp_size=len(hosts)), hosts=hosts)
    try:
        yield made
    finally:
        made.close()


def one_prompt(prefill: KVNode, decode: KVNode, seed: int) -> None:
    request: FakeRequest = prefill.export(NUM_TOKENS)
    transfer_id = request.transfer_id
    source = prefill.blocks.take(prefill.layout, NUM_TOKENS)
    target = decode.blocks.take(decode.layout, NUM_TOKENS)
    started = time.monotonic()
    decode.pull(prefill.peer, transfer_id, NUM_TOKENS, target)
    prefill.prefill(request, seed, source, chunk=40)
    poll_until(lambda: transfer_id in decode.done.received, prefill, decode)
    poll_until(lambda: transfer_id in prefill.done.released, prefill, decode)
    decode.check(seed, range(NUM_TOKENS), target)
    stats = decode.done.stats[transfer_id]
    assert started <= stats.first_byte_at <= stats.last_byte_at <= time.monotonic()


def listening(pid: int) -> set[str]:
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_ranks_here_and_elsewhere_on_both_sides() -> None:
    """Each rank's KV is exported at its own host, and nothing listens anywhere else. A process
    that is restarted comes back there, and gets what it was told in the meantime."""
    with (
        node("kv_producer", LocalHost(), FarHost(LinkKey.create())) as prefill,
        node("kv_consumer", FarHost(LinkKey.create())) as decode,
    ):
        endpoints = prefill.peer.endpoints
        assert [addresses[0].rpartition(":")[0] for addresses in endpoints] == ["127.0.0.1", FAR]
        assert listening(prefill.connector.process_pids[1]) == {FAR}
        assert listening(os.getpid()) & {CORE, FAR} == {CORE}
        one_prompt(prefill, decode, 1)
        os.kill(prefill.connector.process_pids[1], signal.SIGKILL)
        poll_until(lambda: prefill.connector.counters["process_restarts"] == 1, prefill)
        poll_until(lambda: prefill.connector.counters["processes_ready"] == 2, prefill)
        os.kill(decode.connector.process_pids[0], signal.SIGKILL)
        poll_until(lambda: decode.connector.counters["process_restarts"] == 1, decode)
        assert decode.connector.counters["processes_ready"] == 0
        one_prompt(prefill, decode, 2)
        assert prefill.peer.endpoints == endpoints
        until_empty(prefill, decode)


def test_times_of_another_clock_are_ours_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core's host was started a day before the other one."""
    day = 86_400.0
    monotonic = time.monotonic
    with (
        node("kv_producer", LocalHost()) as prefill,
        node("kv_consumer", FarHost(LinkKey.create())) as decode,
    ):
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + day)
        one_prompt(prefill, decode, 1)
        monkeypatch.undo()


def test_reports_of_strangers_are_not_heard() -> None:
    key = LinkKey.create()
    with zmq.Context() as context:
        events = new_socket(context, zmq.SocketType.PULL)
        address = listen(events, CORE, key)
        stranger = connect_secure(context, zmq.SocketType.PUSH, address, LinkKey.create())
        friend = connect_secure(context, zmq.SocketType.PUSH, address, key)
        stranger.send(b"stranger")
        friend.send(b"friend")
        assert events.poll(60_000) and events.recv() == b"friend"
        assert not events.poll(50)
        for one in (stranger, friend, events):
            one.close(linger=0)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with zmq.Context() as context:
        events = new_socket(context, zmq.SocketType.PULL)
        with pytest.raises(zmq.ZMQError):
            listen(events, "203.0.113.1", LinkKey.create())
        events.close()


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    key = LinkKey.create()
    with zmq.Context() as context:
        events = new_socket(context, zmq.SocketType.PULL)
        try:
            address = listen(events, "::1", key)
        except zmq.ZMQError:
            pytest.skip("no IPv6 loopback here")
        friend = connect_secure(context, zmq.SocketType.PUSH, address, key)
        friend.send(b"friend")
        assert events.poll(60_000) and events.recv() == b"friend"
        friend.close(linger=0)
        events.close()


def test_a_rank_elsewhere_looks_a_named_network_up_on_its_own_host(tmp_path: Path) -> None:
    """Each host of a node has another address in it: the engine core's would be wrong there."""
    status = tmp_path / "network-status"
    status.write_text('[{"name": "kube"}, {"name": "fabric/rail0", "ips": ["127.0.0.7"]}]')
    config = KVTransferConfig(
        kv_role="kv_producer",
        hosts=("127.0.0.1",),
        named_hosts=("network:fabric/*",),
        network_status=str(status),
        chunk_bytes=2048,
        staging_bytes=4 << 20,
    )
    hosts = [LocalHost(), FarHost(LinkKey.create())]
    made = KVNode(config, layout(tp_size=2), hosts=hosts)
    try:
        endpoints = made.peer.endpoints
        told = [addresses[0].rpartition(":")[0] for addresses in endpoints]
        assert told == ["127.0.0.1", "127.0.0.7"]
        assert listening(made.connector.process_pids[1]) == {FAR, "127.0.0.7"}
    finally:
        made.close()
