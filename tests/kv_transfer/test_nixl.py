"""KV that is read out of a peer's cache through NIXL, over UCX's TCP and between real agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kv_caches import layout
from kv_loopback import (
    Loopback,
    LoopbackConsumer,
    LoopbackProducer,
    all_tasks_are_held_up,
    new_transfer_id,
    until,
)
from test_direct_copies import pulled_then_exported

from edge.security.config import SecurityConfig, SecurityError
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import RecvMeta, TransferEventKind
from kv_transfer.transports.fetch_job import FetchJob, PullSource
from kv_transfer.transports.nixl import agent, consumer
from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, Transfer
from kv_transfer.transports.nixl.consumer import NixlConsumer, RemoteBlocks
from kv_transfer.transports.nixl.environment import network_devices
from kv_transfer.transports.nixl.producer import NixlProducer

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
SHAPE = layout()
NUM_TOKENS = 129
KV_BYTES = NUM_TOKENS // 16 * SHAPE.block_bytes
"""At least, as messages of the stream."""


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def loopback(theirs: KVLayout = SHAPE, ours: KVLayout = SHAPE, **settings: Any) -> Loopback:
    return Loopback(theirs, ours, data="nixl,stream", num_streams=2, **settings)


def consumers(node: LoopbackConsumer) -> Iterator[NixlConsumer]:
    for receiver in node.receivers:
        yield from (one for one in receiver._transports if isinstance(one, NixlConsumer))


async def pull(prefill: LoopbackProducer, decode: LoopbackConsumer, seed: int) -> int:
    """Returns how many bytes of messages it took."""
    before = sum(sender.bytes_sent for sender in prefill.senders)
    transfer_id, target = await pulled_then_exported(prefill, decode, seed, NUM_TOKENS)
    await decode.until_all(RECEIVED, transfer_id)
    decode.check(seed, range(NUM_TOKENS), target)
    decode.release(prefill.peer, transfer_id)
    await prefill.until_all(RELEASED, transfer_id)
    return sum(sender.bytes_sent for sender in prefill.senders) - before


async def connected(prefill: LoopbackProducer, decode: LoopbackConsumer) -> None:
    """The first KV of a peer comes over the stream; meanwhile agents find each other."""
    assert await pull(prefill, decode, 1) > KV_BYTES
    peers = [peer for one in consumers(decode) for peer in one._peers.values()]
    assert peers
    await until(lambda: all(peer.first_word.has_ended for peer in peers))


@pytest.mark.parametrize(
    ("tp_sizes", "block_sizes"),
    [((1, 1), (16, 16)), ((2, 1), (16, 16)), ((1, 2), (16, 64)), ((1, 1), (64, 16))],
    ids=str,
)
async def test_kv_is_read_where_it_lies(
    tp_sizes: tuple[int, int], block_sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "MIN_PIECE_BYTES", 1)
    shapes = zip(tp_sizes, block_sizes, strict=True)
    theirs, ours = (layout(tp_size=size, block_size=blocks) for size, blocks in shapes)
    async with loopback(theirs, ours, producer_processes=2) as (prefill, decode):
        await connected(prefill, decode)
        names = await pull(prefill, decode, 2)
        assert 0 < names < KV_BYTES // 4, "names, and no KV"
        await prefill.until_empty()
        await decode.until_empty()


async def test_small_pieces_come_over_the_stream() -> None:
    async with loopback(layout(tp_size=2), SHAPE) as (prefill, decode):
        for seed in (1, 2):
            assert await pull(prefill, decode, seed) > KV_BYTES
        assert not any(one._peers for one in consumers(decode))


async def test_what_was_read_counts_as_long_as_the_lease_lasts() -> None:
    async with loopback() as (prefill, decode):
        await connected(prefill, decode)
        (holder,) = (one for one in prefill.senders[0].transports if isinstance(one, NixlProducer))
        (reader,) = consumers(decode)
        (peer,) = reader._peers.values()
        lease = holder.leases.take()
        for is_held in (True, False):
            blocks = RemoteBlocks(prefill.views[0], peer)
            ours, theirs = (np.array([node.views[0].address]) for node in (decode, prefill))
            blocks.copier.copy(ours, theirs, np.array([SHAPE.page_bytes]))
            blocks.copies_issued((lease.slot, lease.number))
            await reader.settled()
            assert blocks.is_held((lease.slot, lease.number)) is is_held
            blocks.release()
            lease.let_go()


async def test_after_a_read_has_failed_kv_comes_over_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loopback() as (prefill, decode):
        await connected(prefill, decode)
        transfer_id, _ = await pulled_then_exported(prefill, decode, 3, 16)
        await decode.until_all(RECEIVED, transfer_id)

        def fails(*_: object) -> bool:
            raise NixlError("a read failed: the cable was pulled")

        with monkeypatch.context() as patch:
            patch.setattr(NixlAgent, "has_ended", fails)
            patch.setattr(Transfer, "is_done", fails)
            transfer_id, _ = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
            (event,) = await decode.until_all(FAILED, transfer_id)
        assert "cable" in event.reason and event.retryable
        assert await pull(prefill, decode, 5) > KV_BYTES


async def test_a_read_that_never_ends_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may have its blocks, and nothing but the end of the process stops it."""
    async with loopback(stall_timeout_s=0.2) as (prefill, decode):
        await connected(prefill, decode)
        told: list[BaseException] = []
        decode.views[0].copies.on_error = told.append
        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "is_done", lambda _: False)
            transfer_id, _ = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
            await until(lambda: bool(told))
        assert "did not end" in str(told[0])
        assert decode.count(RECEIVED, transfer_id) + decode.count(FAILED, transfer_id) == 0


async def test_reads_may_take_as_long_as_their_process_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loopback(stall_timeout_s=0.4) as (prefill, decode):
        await connected(prefill, decode)
        told: list[BaseException] = []
        decode.views[0].copies.on_error = told.append
        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "is_done", lambda _: False)
            transfer_id, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
            (transfer,) = decode.receivers[0]._transfers
            await until(lambda: transfer.received_at > 0)
            await all_tasks_are_held_up(0.7)
            for _ in range(50):
                await asyncio.sleep(0)
        await decode.until_all(RECEIVED, transfer_id)
        assert not told
        decode.check(4, range(NUM_TOKENS), target)


async def test_who_is_not_read_for_long_is_forgotten_and_met_anew() -> None:
    """Nodes that are started again have other names: connections to the old ones would stay."""
    async with loopback() as (prefill, decode):
        (reader,) = consumers(decode)
        for _ in range(2):
            await connected(prefill, decode)
            assert await pull(prefill, decode, 2) < KV_BYTES // 4
            reader.close_idle(60.0)
            assert len(reader._peers) == 1
            reader.close_idle(0.0)
            assert not reader._peers


async def test_a_peer_that_does_not_answer_is_read_over_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "CONNECT_S", 0.05)
    async with loopback() as (prefill, decode):
        for task in prefill._tasks:
            task.cancel()
        for seed in (1, 2):
            await pull(prefill, decode, seed)
            await asyncio.sleep(0.06)
        await pull(prefill, decode, 3)
        (peer,) = (peer for one in consumers(decode) for peer in one._peers.values())
        assert peer.is_lost and "no answer" in peer.first_word.error


async def test_a_peer_may_answer_as_late_as_this_process_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "CONNECT_S", 1.0)
    async with loopback() as (prefill, decode):
        (reader,) = consumers(decode)
        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "is_done", lambda _: False)
            await pull(prefill, decode, 1)
            await all_tasks_are_held_up(1.1)
            await pull(prefill, decode, 2)
            (peer,) = reader._peers.values()
            assert not peer.is_lost
        await connected(prefill, decode)
        assert await pull(prefill, decode, 3) < KV_BYTES // 4


async def test_without_nixl_kv_comes_over_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent, "_MODULES", ("a_module_that_nobody_has",))
    async with loopback() as (prefill, decode):
        assert await pull(prefill, decode, 1) > 0
        assert decode.receivers[0].bytes_received > 0
    for way in ("leave", "come"):
        assert any(f"does not {way} through NIXL" in line for line in caplog.messages), way
    assert "pip install" in caplog.text


async def test_adverts_that_make_no_sense_are_not_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with loopback() as (prefill, decode):
        (one,) = consumers(decode)
        peer = prefill.peer
        meta = RecvMeta(new_transfer_id(), 0, peer, ([1],), 0, 16)
        job = FetchJob(meta, PullSource(0, 1, 0, SHAPE.share(0, 0, 1)), 0, 1)
        foreign = NixlAdvert(b"junk", 0, 64, 1 << 40, None, 1 << 41)
        for advert in (b"", b"\xc1", msgspec.msgpack.encode(foreign)):
            assert one.fetch(job, advert) is None
        assert (
            one.fetch(job, msgspec.msgpack.encode(msgspec.structs.replace(foreign, rank=1))) is None
        )
        assert "described its cache wrongly" in caplog.text
        assert "cannot be reached" in caplog.text


def test_nixl_and_tls_exclude_each_other() -> None:
    """NIXL would move in the clear what the certificates are there to hide."""
    security = SecurityConfig(tls_cert_file="a", tls_key_file="b", tls_ca_file="c")
    with pytest.raises(SecurityError, match="NIXL moves KV in the clear"):
        KVTransferConfig(kv_role="kv_producer", transports="nixl,stream", security=security)


def test_ucx_uses_the_interfaces_of_kv_and_every_rdma_device(tmp_path: Path) -> None:
    """Left to itself it would listen on all of them."""
    (tmp_path / "class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    assert network_devices(["127.0.0.1"], tmp_path) == ["lo", "mlx5_0:1"]
