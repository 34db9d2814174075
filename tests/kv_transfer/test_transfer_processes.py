"""Real transfer processes, scheduler and worker halves: the life of transfers, and their deaths."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from kv_caches import UNTOUCHED, layout
from kv_nodes import FakeRequest, KVNode, poll_until, until_empty
from msgspec.structs import replace as with_fields

from edge.h2.frames import PREFACE
from edge.security.config import Role
from host.child_process import HostedProcess, ipc_address
from host.sockets.local_socket import connect_socket
from kv_transfer.config import TRANSPORTS, KVTransferConfig
from kv_transfer.control import scheduler as connector_scheduler
from kv_transfer.control import transfer_processes
from kv_transfer.control.transfer_processes import TransferProcessFailed
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import ExportMeta, KVTransferParams, SendMeta
from tests.processes import is_gone
from tests.security.authority import Authority, tls_config

MakeNode = Callable[..., KVNode]
both_transports = pytest.mark.parametrize("transports", ["stream", "cuda_ipc,stream"])


def new_node(
    role: str, shape: KVLayout, *, watches_life: bool = False, **settings: object
) -> KVNode:
    config = KVTransferConfig(
        kv_role="kv_producer" if role == "prefill" else "kv_consumer",
        **{"chunk_bytes": 2048, "staging_bytes": 4 << 20, "stall_timeout_s": 20.0, **settings},
    )
    return KVNode(config, shape, watches_life=watches_life)


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    nodes: list[KVNode] = []

    def make(role: str, shape: KVLayout, **settings: object) -> KVNode:
        nodes.append(new_node(role, shape, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture(scope="module")
def shared_nodes() -> Iterator[dict[str, KVNode]]:
    nodes: dict[str, KVNode] = {}
    yield nodes
    for node in nodes.values():
        node.close()


@pytest.fixture
def share_node(shared_nodes: dict[str, KVNode]) -> Iterator[MakeNode]:
    """As `make_node`: asked for the same node again, it gives the one that runs, unless a test has
    left something behind in it."""

    def share(role: str, shape: KVLayout, **settings: object) -> KVNode:
        name = f"{role} {shape} {settings}"
        if name not in shared_nodes:
            shared_nodes[name] = new_node(role, shape, **settings)
        shared_nodes[name].renew()
        return shared_nodes[name]

    yield share
    for name in [name for name, node in shared_nodes.items() if not node.is_empty]:
        shared_nodes.pop(name).close()


@pytest.mark.parametrize(
    ("tp_sizes", "block_sizes", "processes", "num_streams"),
    [
        ((2, 1), (64, 16), (1, 2), 8),
        ((1, 2), (16, 64), (2, 2), 1),
    ],
    ids=str,
)
def test_chunked_prompts_stream_while_they_are_computed(
    make_node: MakeNode,
    tp_sizes: tuple[int, int],
    block_sizes: tuple[int, int],
    processes: tuple[int, int],
    num_streams: int,
) -> None:
    theirs = layout(tp_size=tp_sizes[0], block_size=block_sizes[0])
    ours = layout(tp_size=tp_sizes[1], block_size=block_sizes[1])
    hosts = ("127.0.0.1", "127.0.0.2")
    prefill = make_node("prefill", theirs, num_processes=processes[0], hosts=hosts)
    decode = make_node(
        "decode", ours, num_processes=processes[1], num_streams=num_streams, hosts=hosts
    )
    found = [address.rpartition(":")[0] for rank in prefill.peer.endpoints for address in rank]
    assert set(found) == set(hosts), "every address has a process"
    for seed, (num_tokens, cached, held) in enumerate([(100, 0, 0), (129, 64, 0), (127, 32, 64)]):
        one_prompt(prefill, decode, seed, num_tokens, cached, held)
    until_empty(prefill, decode)
    assert not decode.done.failed and not prefill.done.failed


@pytest.mark.parametrize("ends", [("grpcio", "h2"), ("h2", "grpcio")], ids=str)
def test_either_end_may_be_grpcio(
    make_node: MakeNode, share_node: MakeNode, ends: tuple[str, str]
) -> None:
    prefill, decode = (
        share_node(role, layout()) if end == "h2" else make_node(role, layout(), pull_transport=end)
        for role, end in zip(("prefill", "decode"), ends, strict=True)
    )
    one_prompt(prefill, decode, 1, 100)
    until_empty(prefill, decode)


def test_a_refusal_that_is_read_late_names_its_attempt(
    share_node: MakeNode,
) -> None:
    prefill, decode = share_node("prefill", layout()), share_node("decode", layout())
    request = prefill.export(64)
    transfer_id = request.transfer_id
    source = prefill.blocks.take(prefill.layout, 64)
    target = decode.blocks.take(decode.layout, 64)
    late = KVTransferParams(
        do_remote_prefill=True, transfer_id=transfer_id, attempt=-1, peer=prefill.peer
    )
    assert not decode.connector.abort(FakeRequest("called off", 64, late))
    decode.pull(prefill.peer, transfer_id, 64, target, attempt=-1)
    decode.pull(prefill.peer, transfer_id, 64, target)
    assert prefill.prefill(request, 3, source, chunk=40)
    poll_until(lambda: transfer_id in decode.done.received, prefill, decode)
    assert decode.done.failed_attempts == [(transfer_id, -1)]
    decode.check(3, range(64), target)
    until_empty(prefill, decode)


def one_prompt(
    prefill: KVNode, decode: KVNode, seed: int, num_tokens: int, cached: int = 0, held: int = 0
) -> None:
    """Moves one prompt from export to release, in steps of 40 tokens."""
    request = prefill.export(num_tokens)
    source = prefill.blocks.take(prefill.layout, num_tokens)
    target = decode.blocks.take(decode.layout, num_tokens)
    decode.pull(prefill.peer, request.transfer_id, num_tokens, target, first_token=held)
    assert prefill.prefill(request, seed, source, chunk=40, cached=cached)
    poll_until(lambda: request.transfer_id in decode.done.received, prefill, decode)
    poll_until(lambda: request.transfer_id in prefill.done.released, prefill, decode)
    assert request.transfer_id in prefill.done.sent
    decode.check(seed, range(held, num_tokens), target)
    stats = decode.done.stats[request.transfer_id]
    assert stats.num_bytes > 0 and 0 < stats.first_byte_at <= stats.last_byte_at


@both_transports
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_killed_transfer_process(
    share_node: MakeNode, role: str, transports: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its transfers fail on both sides, the log says why, it comes back at its address, and
    new ones succeed."""
    shape = layout()
    prefill = share_node("prefill", shape, transports=transports)
    decode = share_node("decode", shape, transports=transports)
    victim = prefill if role == "prefill" else decode
    restarts = int(victim.connector.counters["process_restarts"])
    moved = decode.connector.counters["bytes_moved"]
    endpoints = prefill.peer.endpoints
    request = prefill.export(64)
    transfer_id = request.transfer_id
    source = prefill.blocks.take(shape, 64)
    target = decode.blocks.take(shape, 64)
    decode.pull(prefill.peer, transfer_id, 64, target)
    prefill.step([(request, 1, range(32), source)])
    poll_until(lambda: decode.connector.counters["bytes_moved"] > moved, prefill, decode)

    os.kill(victim.connector.process_pids[0], signal.SIGKILL)
    poll_until(lambda: transfer_id in decode.done.failed, prefill, decode)
    ended = prefill.done.failed if role == "prefill" else prefill.done.aborted
    poll_until(lambda: transfer_id in ended, prefill, decode)
    assert decode.done.failed[transfer_id][1], "another attempt may succeed"
    until_restarted(victim, restarts + 1, prefill, decode)
    until_empty(prefill, decode)
    assert prefill.peer.endpoints == endpoints
    assert " was killed by SIGKILL and is started again" in caplog.text

    one_prompt(prefill, decode, 2, 64)
    until_empty(prefill, decode)
    counters = decode.connector.counters
    by_way = {name: counters[f"received_bytes_{name}"] for name in TRANSPORTS}
    assert sum(by_way.values()) == counters["bytes_moved"], "of former lives, too"
    assert {name for name, received in by_way.items() if received} <= {*transports.split(",")}


@both_transports
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_frozen_transfer_process(make_node: MakeNode, role: str, transports: str) -> None:
    """It is killed, as nobody can wait for it: what follows is as after any other death. The limit
    is longer than a busy machine holds up a process that is well."""
    shape = layout()
    patience = {"frozen_after_s": 2.5, "lease_s": 3600.0, "stall_timeout_s": 3600.0}
    prefill = make_node("prefill", shape, watches_life=True, transports=transports, **patience)
    decode = make_node("decode", shape, watches_life=True, transports=transports, **patience)
    victim = prefill if role == "prefill" else decode
    request = prefill.export(64)
    source = prefill.blocks.take(shape, 64)
    decode.pull(prefill.peer, request.transfer_id, 64, decode.blocks.take(shape, 64))
    prefill.step([(request, 1, range(32), source)])
    poll_until(lambda: decode.connector.counters["bytes_moved"] > 0, prefill, decode)

    (pid,) = victim.connector.process_pids
    os.kill(pid, signal.SIGSTOP)
    poll_until(lambda: request.transfer_id in victim.done.failed, prefill, decode)
    reason, may_retry = victim.done.failed[request.transfer_id]
    assert "gave no sign of life" in reason and may_retry
    assert is_gone(pid)
    until_restarted(victim, 1, prefill, decode)
    until_empty(prefill, decode)
    one_prompt(prefill, decode, 2, 64)
    until_empty(prefill, decode)


@both_transports
def test_kv_of_a_computed_prompt_that_does_not_come(make_node: MakeNode, transports: str) -> None:
    """The peer's process is well, and says so without end. Where it was held up for longer than
    that alone, it is asked for another one."""
    prefill = make_node("prefill", layout(), stall_timeout_s=1.0, transports=transports)
    decode = make_node("decode", layout(), stall_timeout_s=1.0, transports=transports)
    reasons: list[str] = []
    while len(reasons) < 10 and not any("has computed the prompt" in one for one in reasons):
        transfer_id = prefill.export(40).transfer_id
        pulling = decode.pull(prefill.peer, transfer_id, 40, [1, 2, 3])
        decode.connector.prompt_computed(pulling)
        poll_until(lambda: transfer_id in decode.done.failed, prefill, decode)  # noqa: B023
        reason, may_retry = decode.done.failed[transfer_id]
        reasons.append(reason)
        assert may_retry
        poll_until(lambda: transfer_id in prefill.done.aborted, prefill, decode)  # noqa: B023
        until_empty(prefill, decode)
    *others, last = reasons
    assert "has computed the prompt, and sent no KV for 1 s" in last
    assert all("said nothing for 1 s" in one for one in others)


@pytest.mark.parametrize("aborting", ["prefill", "decode"])
@pytest.mark.parametrize("stage", ["exported", "streaming", "finished"])
def test_abort_from_either_side(share_node: MakeNode, aborting: str, stage: str) -> None:
    shape = layout(tp_size=2)
    prefill = share_node("prefill", shape)
    decode = share_node("decode", layout(tp_size=1, block_size=64))
    before = prefill.connector.counters
    request = prefill.export(100)
    transfer_id = request.transfer_id
    source = prefill.blocks.take(shape, 100)
    target = decode.blocks.take(decode.layout, 100)
    pulling = decode.pull(prefill.peer, transfer_id, 100, target)
    if stage != "exported":
        prefill.step([(request, 1, range(64), source)])
        moved = decode.connector.counters["bytes_moved"]
        poll_until(lambda: decode.connector.counters["bytes_moved"] > moved, prefill, decode)
    if stage == "finished":
        prefill.step([(request, 1, range(64, 100), source)])
        assert prefill.connector.request_finished(request)
        poll_until(lambda: transfer_id in prefill.done.sent, prefill, decode)
    if aborting == "prefill":
        if prefill.connector.abort(request):
            poll_until(lambda: transfer_id in prefill.done.aborted, prefill, decode)
        ends = (decode.done.failed, decode.done.received)
        poll_until(lambda: any(transfer_id in end for end in ends), prefill, decode)
    else:
        if decode.connector.abort(pulling):
            poll_until(lambda: transfer_id in decode.done.aborted, prefill, decode)
        ends = (prefill.done.aborted, prefill.done.released)
        poll_until(lambda: any(transfer_id in end for end in ends), prefill, decode)
    until_empty(prefill, decode)
    assert not prefill.connector.request_finished(request), "nothing keeps the blocks"
    expected = {"reclaimed_aborted"} if aborting == "prefill" else {"reclaimed_given_up"}

    def is_told_why() -> bool:
        counters = prefill.connector.counters
        return any(counters[why] > before[why] for why in (*expected, "reclaimed_released"))

    poll_until(is_told_why, prefill, decode)
    assert prefill.connector.counters["failures"] == before["failures"]


def test_failed_attempt_then_retry_into_the_same_blocks(
    make_node: MakeNode, share_node: MakeNode
) -> None:
    """The first peer goes when a part has come; the second attempt gets the rest from another."""
    shape = layout()
    first = make_node("prefill", shape)
    second = share_node("prefill", shape)
    decode = share_node("decode", shape)
    target = decode.blocks.take(shape, 50)
    request = first.export(50)
    transfer_id = request.transfer_id
    decode.pull(first.peer, transfer_id, 50, target)
    poll_until(lambda: first.connector.counters["open_pulls"] > 0, first, decode)
    moved = decode.connector.counters["bytes_moved"]
    first.step([(request, 6, range(33), first.blocks.take(shape, 50))])
    whole = 2 * shape.block_bytes
    poll_until(lambda: decode.connector.counters["bytes_moved"] - moved == whole, first, decode)
    first.close()
    poll_until(lambda: transfer_id in decode.done.failed, decode)
    assert decode.done.failed[transfer_id][1]
    assert decode.done.num_tokens_kept == {transfer_id: 32}

    assert request.kv_transfer_params is not None
    retried = with_fields(request.kv_transfer_params, attempt=1)
    request = FakeRequest("p", 50, retried)
    second.connector.update_state_after_alloc(request, (), 0)
    decode.pull(second.peer, transfer_id, 50, target, first_token=32, attempt=1)
    second.prefill(request, 6, second.blocks.take(shape, 50))
    poll_until(lambda: transfer_id in decode.done.received, second, decode)
    decode.check(6, range(50), target)
    until_empty(second, decode)


def test_mismatch_is_named_and_final(make_node: MakeNode, share_node: MakeNode) -> None:
    prefill = make_node("prefill", layout(num_layers=2))
    decode = share_node("decode", layout())
    request = prefill.export(20)
    decode.pull(prefill.peer, request.transfer_id, 20, decode.blocks.take(decode.layout, 20))
    poll_until(lambda: request.transfer_id in decode.done.failed, prefill, decode)
    reason, retryable = decode.done.failed[request.transfer_id]
    assert "differ in groups[0].layers: this node has (0, 1, 2), the peer has (0, 1)" in reason
    assert not retryable
    until_empty(prefill, decode)


def test_full_local_hit_releases_the_peer_at_once(share_node: MakeNode) -> None:
    prefill = share_node("prefill", layout())
    decode = share_node("decode", layout())
    request = prefill.export(48)
    decode.pull(prefill.peer, request.transfer_id, 48, [1, 2, 3], first_token=48)
    poll_until(lambda: request.transfer_id in prefill.done.released, prefill, decode)
    assert request.transfer_id in prefill.done.sent
    until_empty(prefill, decode)


def until_restarted(node: KVNode, times: int, *nodes: KVNode) -> None:
    def is_back() -> bool:
        counters = node.connector.counters
        num_ready = node.config.num_processes * node.layout.tp_size
        return counters["process_restarts"] == times and counters["processes_ready"] == num_ready

    poll_until(is_back, *nodes)


def test_many_transfers_with_deaths_and_aborts_leave_nothing(make_node: MakeNode) -> None:
    """Interleaved prompts; every third is aborted, and both sides lose a process on the way. Whose
    peer is gone is free when its lease ends."""
    shape = layout()
    prefill = make_node("prefill", shape, num_processes=2, lease_s=3.0)
    decode = make_node("decode", layout(block_size=64), num_processes=2)
    late = 0
    for seed in range(24):
        request = prefill.export(40)
        source = prefill.blocks.take(shape, 40)
        target = decode.blocks.take(decode.layout, 40)
        pulling = decode.pull(prefill.peer, request.transfer_id, 40, target)
        prefill.prefill(request, seed, source, chunk=25)
        if seed % 3 == 0:
            (prefill if seed % 2 else decode).connector.abort(request if seed % 2 else pulling)
        if seed in (8, 16):
            os.kill((prefill if seed == 8 else decode).connector.process_pids[1], signal.SIGKILL)
        ends = (decode.done.received, decode.done.failed, decode.done.aborted)
        poll_until(lambda: any(request.transfer_id in end for end in ends), prefill, decode)  # noqa: B023
        if request.transfer_id in decode.done.received:
            decode.check(seed, range(40), target)
        elif seed % 3 and seed not in (8, 16):
            poll_until(lambda: request.transfer_id in prefill.done.failed, prefill, decode)  # noqa: B023
            assert "the lease has ended" in prefill.done.failed[request.transfer_id][0]
            late += 1
        for node, killed_at in ((prefill, 8), (decode, 16)):
            until_restarted(node, int(seed >= killed_at), prefill, decode)
        prefill.blocks.free += source
        decode.blocks.free += target
        for cache in decode.caches:
            cache.words[:, target] = int.from_bytes(bytes([UNTOUCHED] * 2), "little")
    until_empty(prefill, decode)
    hurt = len(decode.done.failed) + len(decode.done.aborted)
    assert len(decode.done.received) == 24 - hurt and hurt <= 10 + late, decode.done.failed
    assert late <= 3, "only on a busy machine nobody pulls for so long"


def test_a_process_that_cannot_start_says_so(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that was this host's when it was looked at, and no longer is."""
    monkeypatch.setattr(connector_scheduler, "check_own", lambda hosts: None)
    with pytest.raises(TransferProcessFailed, match="transfer process 0 of rank 0 could not start"):
        make_node("prefill", layout(), hosts=("256.1.1.1",))


def test_a_port_that_another_process_has_is_named(make_node: MakeNode) -> None:
    """The operator sees this one line, and not the log of a child."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reason = rf"KV cannot be served at 127.0.0.1:{port} \(Address already in use\)"
        with pytest.raises(TransferProcessFailed, match=reason):
            make_node("prefill", layout(), hosts=("127.0.0.1",), port=port)


@pytest.mark.parametrize(("num_killed", "starts"), [(2, True), (9, False)])
def test_a_process_that_is_killed_while_it_starts_is_started_again(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, num_killed: int, starts: bool
) -> None:
    """As a kernel that is short of memory does, in the midst of a change of roles."""
    begin = transfer_processes._TransferProcess.start
    begun: list[int] = []

    def start(process: transfer_processes._TransferProcess) -> HostedProcess:
        child = begin(process)
        begun.append(child.pid)
        if len(begun) <= num_killed:
            os.kill(child.pid, signal.SIGKILL)
        return child

    monkeypatch.setattr(transfer_processes._TransferProcess, "start", start)
    if not starts:
        with pytest.raises(TransferProcessFailed, match="killed by SIGKILL while starting"):
            make_node("prefill", layout())
        assert len(begun) == 4
        return
    prefill, decode = make_node("prefill", layout()), make_node("decode", layout())
    assert len(begun) == 4
    one_prompt(prefill, decode, seed=1, num_tokens=40)
    until_empty(prefill, decode)


def test_processes_that_keep_dying_are_started_with_growing_pauses(make_node: MakeNode) -> None:
    """While one is down, transfers fail at once instead of waiting for it, and nobody else gets
    its port."""
    node = make_node("prefill", layout())
    ((address,),) = endpoints = node.peer.endpoints
    for restarts in (1, 2):
        os.kill(node.connector.process_pids[0], signal.SIGKILL)
        poll_until(lambda: node.connector.counters["process_restarts"] == restarts, node)  # noqa: B023
        if restarts == 1:
            poll_until(lambda: node.connector.counters["processes_ready"] == 1, node)
    request = node.export(20)
    poll_until(lambda: request.transfer_id in node.done.failed, node)
    assert "is being restarted" in node.done.failed[request.transfer_id][0]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
    poll_until(lambda: node.connector.counters["processes_ready"] == 1, node)
    node.connector.abort(node.export(20))
    poll_until(lambda: len(node.done.aborted) == 1, node)
    until_empty(node)
    assert node.peer.endpoints == endpoints


def test_a_process_whose_port_is_lost_takes_another_which_peers_learn(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_node("prefill", layout()), make_node("decode", layout())
    ((before,),) = prefill.peer.endpoints
    thieves: list[socket.socket] = []

    def steal(address: str) -> None:
        host, _, port = address.rpartition(":")
        thieves.append(socket.create_server((host, int(port))))

    monkeypatch.setattr(transfer_processes, "_hold_port", steal)
    os.kill(prefill.connector.process_pids[0], signal.SIGKILL)
    until_restarted(prefill, 1, prefill)
    assert [thief.getsockname()[1] for thief in thieves] == [int(before.rpartition(":")[2])]
    ((after,),) = prefill.peer.endpoints
    assert after != before
    one_prompt(prefill, decode, seed=1, num_tokens=40)
    until_empty(prefill, decode)
    thieves[0].close()


def test_a_process_that_hears_junk_goes_on(make_node: MakeNode) -> None:
    node = make_node("prefill", layout())
    (pid,) = node.connector.process_pids
    with zmq.Context() as context:
        engine_id = node.peer.engine_id
        for name in ("kv-commands-0-0", "kv-steps-0-0", "kv-events"):
            sender = connect_socket(context, zmq.SocketType.PUSH, ipc_address(engine_id, name))
            sender.send(b"not a command")
            poll_until(lambda: node.connector.counters["dropped_messages"] >= 1, node)
            sender.close()
        poll_until(lambda: node.connector.counters["dropped_messages"] == 3, node)
    transfer_id = node.export(20).transfer_id
    node.connector.abort(FakeRequest("p", 20, KVTransferParams(transfer_id=transfer_id)))
    poll_until(lambda: transfer_id in node.done.aborted, node)
    assert node.connector.process_pids == [pid]
    until_empty(node)


def test_a_process_that_fails_at_a_command_is_started_again(make_node: MakeNode) -> None:
    """A fault of ours: commands of the scheduler half are believed. What else the process had is
    lost with it, and nothing more."""
    prefill, decode = make_node("prefill", layout()), make_node("decode", layout())
    (pid,) = prefill.connector.process_pids
    lost = prefill.export(40).transfer_id
    with zmq.Context() as context:
        address = ipc_address(prefill.peer.engine_id, "kv-commands-0-0")
        commands = connect_socket(context, zmq.SocketType.PUSH, address)
        for command in (
            ExportMeta("no hex digits", 0, 40),
            SendMeta("no hex digits", 0, -1, 0, 40, ((1, 2, 3),)),
        ):
            commands.send(msgspec.msgpack.encode(command))
        poll_until(lambda: lost in prefill.done.failed, prefill)
        commands.close(linger=0)
    reason, may_retry = prefill.done.failed[lost]
    assert "a transfer process was lost" in reason and may_retry
    assert is_gone(pid)
    until_restarted(prefill, 1, prefill)
    one_prompt(prefill, decode, 1, 40)
    until_empty(prefill, decode)


def test_names_that_are_no_names_hurt_nobody(share_node: MakeNode) -> None:
    prefill = share_node("prefill", layout())
    decode = share_node("decode", layout())
    for wrong in ("x", "AB" * 16, "é" * 32, "0" * 33):
        prefill.export(20, transfer_id=wrong)
        pulling = decode.pull(prefill.peer, wrong, 20, [1, 2])
        poll_until(lambda: wrong in prefill.done.failed, prefill)  # noqa: B023
        poll_until(lambda: wrong in decode.done.failed, decode)  # noqa: B023
        assert not decode.done.failed[wrong][1]
        assert not decode.connector.abort(pulling)
    one_prompt(prefill, decode, 1, 40)
    until_empty(prefill, decode)


def test_an_attempt_that_has_ended_cannot_be_exported_again(share_node: MakeNode) -> None:
    node = share_node("prefill", layout())
    request = node.export(20)
    assert node.connector.abort(request)
    poll_until(lambda: node.done.aborted == [request.transfer_id], node)
    node.export(20, transfer_id=request.transfer_id)
    poll_until(lambda: request.transfer_id in node.done.failed, node)
    assert "has ended" in node.done.failed[request.transfer_id][0]
    until_empty(node)


def test_an_attempt_older_than_one_that_lives_is_refused(share_node: MakeNode) -> None:
    """Its engine would compute a prompt that is read by no peer."""
    node = share_node("prefill", layout())
    older = node.export(20)
    assert older.kv_transfer_params is not None
    newer = FakeRequest("p", 20, with_fields(older.kv_transfer_params, attempt=1))
    assert not node.connector.refusal(newer)
    node.connector.update_state_after_alloc(newer, (), 0)
    assert "a newer one has begun" in node.connector.refusal(older)
    assert not node.connector.refusal(newer)
    assert node.connector.abort(newer)
    poll_until(lambda: node.done.aborted == [older.transfer_id], node)
    assert not node.done.failed
    until_empty(node)


def test_attempts_that_end_at_once_are_told_each_by_its_name(
    share_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of `get_finished` a process that is down ends a transfer."""
    node = share_node("prefill", layout())
    with monkeypatch.context() as patch:
        patch.setattr(node.connector._processes, "send", lambda process, command: False)
        older = node.export(20)
        assert older.kv_transfer_params is not None
        newer = FakeRequest("p", 20, with_fields(older.kv_transfer_params, attempt=1))
        assert node.connector.refusal(older) and not node.connector.refusal(newer)
        node.connector.update_state_after_alloc(newer, (), 0)
        assert node.connector.refusal(newer), "it has ended, too"
    poll_until(lambda: older.transfer_id in node.done.failed, node)
    assert node.done.failed_attempts == [(older.transfer_id, 0), (older.transfer_id, 1)]
    assert node.done.failed[older.transfer_id][1], "another attempt may succeed"
    until_empty(node)


def test_nothing_outlives_the_connector(make_node: MakeNode) -> None:
    node = make_node("prefill", layout(), num_processes=2)
    pids = node.connector.process_pids
    assert len(pids) == 2
    node.connector.shutdown()
    node.connector.shutdown()
    assert all(is_gone(pid) for pid in pids)


def test_connections_without_tls_are_counted_while_it_is_turned_on(
    make_node: MakeNode, tmp_path: Path
) -> None:
    config = tls_config(Authority(tmp_path).service("prefill", Role.PREFILL))
    node = make_node(
        "prefill", layout(), security=dataclasses.replace(config, accept_missing_tls=True)
    )
    ((address,),) = node.peer.endpoints
    host, _, port = address.rpartition(":")
    peers = [socket.create_connection((host, int(port))) for _ in range(2)]
    for peer in peers:
        peer.sendall(PREFACE)
    poll_until(lambda: node.connector.counters["plaintext_connections"] == len(peers), node)
    for peer in peers:
        peer.close()
