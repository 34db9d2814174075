"""Nodes of one host: decode copies KV out of the prefill node's cache itself.

On CPU both caches are memory files; the protocol is that of GPUs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from kv_caches import GroupBlocks, RankCache, layout
from kv_loopback import Loopback, LoopbackConsumer, LoopbackProducer, new_transfer_id, until
from late_device import LateDevice

from kv_transfer.base import KVCacheHandle
from kv_transfer.config import KVTransferConfig
from kv_transfer.consumer import receiver
from kv_transfer.memory.devices.device import MemoryDevice
from kv_transfer.memory.devices.host_device import HostDevice
from kv_transfer.metadata import KVPeer, TransferEventKind
from kv_transfer.transports.cuda_ipc.consumer import CudaIpcConsumer
from kv_transfer.transports.cuda_ipc.local_pull_server import LocalPullServer
from kv_transfer.transports.cuda_ipc.peer_caches import PeerCaches
from kv_transfer.transports.cuda_ipc.producer import CudaIpcProducer
from kv_transfer.transports.stream.producer import StreamProducer

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
SHAPE = layout()


async def pulled_then_exported(
    prefill: LoopbackProducer, decode: LoopbackConsumer, seed: int, num_tokens: int
) -> tuple[str, GroupBlocks]:
    """Pulls wait before the first layer is done, so nothing is staged."""
    transfer_id = new_transfer_id()
    source = prefill.new_blocks(num_tokens)
    target = decode.pull(prefill.peer, transfer_id, num_tokens)
    prefill.export(transfer_id, num_tokens)
    await until(lambda: all(sender.num_pulls > 0 for sender in prefill.senders))
    prefill.send(transfer_id, 1, range(num_tokens), source, num_tokens)
    for layer in range(prefill.layout.num_layers):
        prefill.compute(seed, 1, layer, range(num_tokens), source)
    return transfer_id, target


async def whole_transfer(prefill: LoopbackProducer, decode: LoopbackConsumer, seed: int) -> None:
    """Moves 60 tokens, checks them, and releases what both sides held."""
    transfer_id, target = await pulled_then_exported(prefill, decode, seed, 60)
    await decode.until_all(RECEIVED, transfer_id)
    decode.check(seed, range(60), target)
    decode.release(prefill.peer, transfer_id)
    await prefill.until_all(RELEASED, transfer_id)


def num_local_connections(prefill: LoopbackProducer) -> int:
    """Returns the connections over which its pullers call without a network."""
    transports = [transport for sender in prefill.senders for transport in sender.transports]
    servers = [one._calls for one in transports if isinstance(one, CudaIpcProducer)]
    return sum(server.num_connections for server in servers if server is not None)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
async def test_every_pair_of_layouts(
    tp_sizes: tuple[int, int], block_sizes: tuple[int, int], is_late: bool
) -> None:
    theirs = layout(tp_size=tp_sizes[0], block_size=block_sizes[0])
    ours = layout(tp_size=tp_sizes[1], block_size=block_sizes[1])
    device: MemoryDevice = LateDevice(is_held=False) if is_late else HostDevice()
    loopback = Loopback(
        theirs,
        ours,
        num_streams=2,
        producer_processes=2,
        consumer_processes=1,
        data="cuda_ipc,stream",
        devices=(device, device),
    )
    async with loopback as (prefill, decode):
        transfer_id, target = await pulled_then_exported(prefill, decode, 3, 129)
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(3, range(129), target)
        assert prefill.staged_bytes == 0
        assert prefill.count(STAGED, transfer_id) == 0, "the blocks are still needed"
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        assert prefill.count(STAGED, transfer_id) == prefill.num_processes
        await prefill.until_empty()
        await decode.until_empty()


async def test_what_is_still_in_its_blocks_is_copied_out_of_them() -> None:
    """Though it was staged, because no puller had come."""
    async with Loopback(SHAPE, SHAPE, data="cuda_ipc,stream") as (prefill, decode):
        transfer_id = new_transfer_id()
        source = prefill.blocks.take(SHAPE, 100)
        prefill.export(transfer_id, 100)
        prefill.send(transfer_id, 1, range(100), source, 100)
        prefill.compute(5, 1, 0, range(100), source)
        assert prefill.staged_bytes == 0, "a puller may come any moment"
        await until(lambda: prefill.staged_bytes > 0)
        target = decode.pull(prefill.peer, transfer_id, 100)
        await until(lambda: decode.count(FIRST_BYTE, transfer_id) == 1)
        staged = prefill.staged_bytes
        moved = prefill.senders[0].bytes_sent
        for layer in (1, 2):
            prefill.compute(5, 1, layer, range(100), source)
        await decode.until_all(RECEIVED, transfer_id)
        assert prefill.staged_bytes == staged
        assert prefill.senders[0].bytes_sent - moved < SHAPE.page_bytes, "names, and no KV"
        decode.check(5, range(100), target)
        (event,) = await decode.until_all(RECEIVED, transfer_id)
        assert event.stats.num_streams == 1 and num_local_connections(prefill) == 1
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        await prefill.until_empty()


async def test_what_has_left_its_blocks_comes_over_the_network() -> None:
    async with Loopback(SHAPE, SHAPE, data="cuda_ipc,stream") as (prefill, decode):
        transfer_id = prefill.export_computed(6, 100)
        await prefill.until_all(STAGED, transfer_id)
        target = decode.pull(prefill.peer, transfer_id, 100)
        (event,) = await decode.until_all(RECEIVED, transfer_id)
        assert event.stats.num_streams == 4, "there, several streams are worth it"
        assert prefill.senders[0].bytes_sent > 100 // 16 * SHAPE.block_bytes
        decode.check(6, range(100), target)
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        assert prefill.count(STAGED, transfer_id) == 1
        await prefill.until_empty()
        await decode.until_empty()


async def test_of_what_no_transport_brings_nothing_counts_as_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that says nothing of the stream, and whose blocks serve others already."""
    monkeypatch.setattr(StreamProducer, "advertise", lambda self, puller_host: None)
    async with Loopback(SHAPE, SHAPE, data="cuda_ipc,stream") as (prefill, decode):
        transfer_id = prefill.export_computed(6, 100)
        await prefill.until_all(STAGED, transfer_id)
        decode.pull(prefill.peer, transfer_id, 100, first_token=16)
        (event,) = await decode.until_all(FAILED, transfer_id)
        assert event.num_tokens_kept == 16
        decode.release(prefill.peer, transfer_id, complete=False)
        await prefill.until_all(ABORTED, transfer_id)


async def only_missing_tokens_come(prefill: LoopbackProducer, decode: LoopbackConsumer) -> None:
    """Pulls the end of a prompt, and checks that nothing else was written."""
    transfer_id = new_transfer_id()
    source = prefill.blocks.take(prefill.layout, 100)
    prefill.compute_all(4, 100, source)
    target = decode.pull(prefill.peer, transfer_id, 100, first_token=35)
    prefill.export(transfer_id, 100)
    await until(lambda: prefill.senders[0].num_pulls > 0)
    prefill.send(transfer_id, -1, range(100), source, 100)
    await decode.until_all(RECEIVED, transfer_id)
    decode.check(4, range(35, 100), target)


async def test_only_missing_tokens_are_copied() -> None:
    async with Loopback(SHAPE, layout(block_size=64), data="cuda_ipc,stream") as (prefill, decode):
        await only_missing_tokens_come(prefill, decode)


@pytest.mark.parametrize("setting", ["stream", "auto"])
async def test_one_side_that_does_not_allow_it_is_enough(setting: str) -> None:
    """On CPU `auto` means over the network."""
    loopback = Loopback(SHAPE, SHAPE, data="cuda_ipc,stream")
    loopback.producer = LoopbackProducer(
        KVTransferConfig(kv_role="kv_producer", chunk_bytes=2048, transports=setting), SHAPE
    )
    async with loopback as (prefill, decode):
        transfer_id, target = await pulled_then_exported(prefill, decode, 1, 60)
        await prefill.until_all(STAGED, transfer_id)
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(1, range(60), target)
        assert not any(isinstance(t, CudaIpcProducer) for t in prefill.senders[0].transports)


async def test_a_cache_that_cannot_be_mapped_comes_over_the_network(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Loopback(SHAPE, SHAPE, data="cuda_ipc,stream") as (prefill, decode):
        prefill.views[0].handle = KVCacheHandle(rank=0, pid=os.getpid(), fd=9999, num_blocks=64)
        for seed in range(2):
            await whole_transfer(prefill, decode, seed)
        warnings = [record for record in caplog.records if "cannot be mapped" in record.message]
        assert len(warnings) == 1


async def test_where_there_are_no_local_calls_names_come_over_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_sockets(self: LocalPullServer) -> None:
        raise OSError("no abstract sockets here")

    monkeypatch.setattr(LocalPullServer, "listen", no_sockets)
    async with Loopback(SHAPE, SHAPE, data="cuda_ipc,stream") as (prefill, decode):
        transfer_id, target = await pulled_then_exported(prefill, decode, 3, 60)
        (event,) = await decode.until_all(RECEIVED, transfer_id)
        decode.check(3, range(60), target)
        assert event.stats.num_streams == 1 and prefill.staged_bytes == 0
        assert num_local_connections(prefill) == 0


async def test_the_holder_aborts_before_the_last_layer() -> None:
    async with Loopback(SHAPE, SHAPE, data="cuda_ipc,stream") as (prefill, decode):
        transfer_id = new_transfer_id()
        source = prefill.blocks.take(SHAPE, 100)
        decode.pull(prefill.peer, transfer_id, 100)
        prefill.export(transfer_id, 100)
        await until(lambda: prefill.senders[0].num_pulls > 0)
        prefill.send(transfer_id, 1, range(100), source, 100)
        prefill.compute(5, 1, 0, range(100), source)
        await until(lambda: decode.count(FIRST_BYTE, transfer_id) == 1)
        prefill.abort(transfer_id)
        (event,) = await decode.until_all(FAILED, transfer_id)
        assert event.retryable
        await until(lambda: prefill.senders[0].num_pulls == 0)
        await prefill.until_empty()
        await decode.until_empty()


HOLDER = """
import sys
from host.memory_file import MemoryFile
memory = MemoryFile.create("test-kv", int(sys.argv[1]))
print(memory.fd, flush=True)
sys.stdin.read()
"""


def start_holder(num_bytes: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize("in_use", [False, True])
async def test_the_memory_of_a_dead_process_is_let_go(in_use: bool) -> None:
    """A GPU's memory is not free while anybody maps it; users keep it until they are done."""
    num_bytes = 4 * SHAPE.block_bytes
    holder = start_holder(num_bytes)
    try:
        assert holder.stdout is not None
        handle = KVCacheHandle(
            rank=0, pid=holder.pid, fd=int(holder.stdout.readline()), num_blocks=4
        )
        caches = PeerCaches(HostDevice())
        peer = KVPeer(engine_id="p", epoch=1, layout=SHAPE)
        cache = caches.acquire(peer, handle)
        assert cache is not None and caches.acquire(peer, handle) is cache
        caches.release(cache)
        if not in_use:
            caches.release(cache)
        holder.kill()
        await until(lambda: not caches._mapped)
        assert len(caches) == int(in_use)
        if in_use:
            assert caches.acquire(peer, handle) is None
            caches.release(cache)
        assert len(caches) == 0
        caches.close()
    finally:
        holder.kill()
        holder.communicate()


async def test_a_cache_that_nobody_reads_for_long_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node may live on under another name, as after a change of its role. It can come back."""
    monkeypatch.setattr(receiver, "_IDLE_S", 0.01)
    async with Loopback(SHAPE, SHAPE, data="cuda_ipc,stream") as (prefill, decode):
        (caches,) = [
            transport.peer_caches
            for transport in decode.receivers[0]._transports
            if isinstance(transport, CudaIpcConsumer)
        ]
        for seed in range(2):
            await whole_transfer(prefill, decode, seed)
            assert len(caches) == 1
            house = asyncio.create_task(decode.receivers[0].run())
            await until(lambda: len(caches) == 0)
            house.cancel()


async def test_closing_lets_everything_go() -> None:
    own = RankCache(SHAPE, 0, 4)
    caches = PeerCaches(HostDevice())
    peer = KVPeer(engine_id="p", epoch=1, layout=SHAPE)
    assert caches.acquire(peer, own.handle) is not None
    await asyncio.sleep(0)
    caches.close()
    assert len(caches) == 0
    own.close()
