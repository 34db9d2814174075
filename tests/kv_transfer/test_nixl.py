"""KV that is read out of a peer's window through NIXL: every shape of nodes and windows, and what
comes over the stream instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from kv_caches import full_and_window, latent, layout, scaled_and_latent, states_and_full
from kv_loopback import LoopbackConsumer, all_tasks_are_held_up, new_transfer_id, until
from late_device import LateDevice
from nixl_pairs import (
    CHUNK_BYTES,
    NUM_TOKENS,
    SHAPE,
    HeldReads,
    both_empty,
    connected,
    consumers,
    kv_bytes,
    loopback,
    pull,
    queue_of,
)
from test_direct_copies import only_missing_tokens_come, pulled_then_exported

from edge.security.config import SecurityConfig, SecurityError
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.memory.devices.device import DeviceError, Mapping
from kv_transfer.memory.devices.host_device import HostDevice
from kv_transfer.metadata import RecvMeta, TransferEventKind
from kv_transfer.transports.fetch_job import FetchJob, PullSource
from kv_transfer.transports.nixl import agent, peers
from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, Transfer
from kv_transfer.transports.nixl.environment import network_devices

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
KV_BYTES = kv_bytes(SHAPE)


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
async def test_every_pair_of_layouts(
    tp_sizes: tuple[int, int], block_sizes: tuple[int, int]
) -> None:
    """Small pieces of the cache are gathered before they are read."""
    shapes = zip(tp_sizes, block_sizes, strict=True)
    theirs, ours = (layout(tp_size=size, block_size=blocks) for size, blocks in shapes)
    async with loopback(theirs, ours, producer_processes=2) as (prefill, decode):
        await connected(prefill, decode)
        told = await pull(prefill, decode, 2)
        assert 0 < told < kv_bytes(theirs) // 4, "messages of slots, and no KV"
        await both_empty(prefill, decode)


@pytest.mark.parametrize(
    ("shape", "tp_sizes"),
    [
        (full_and_window, (2, 1)),
        (full_and_window, (1, 2)),
        (latent, (1, 2)),
        (scaled_and_latent, (2, 1)),
        (scaled_and_latent, (1, 2)),
        (states_and_full, (1, 1)),
        (states_and_full, (2, 1)),
    ],
)
async def test_every_kind_of_cache(
    shape: Callable[..., KVLayout], tp_sizes: tuple[int, int]
) -> None:
    theirs, ours = (shape(tp_size=size) for size in tp_sizes)
    async with loopback(theirs, ours, windows=(1 << 16, 1 << 16)) as (prefill, decode):
        await connected(prefill, decode)
        before = sum(sender.bytes_sent for sender in prefill.senders)
        transfer_id, target = await pulled_then_exported(prefill, decode, 2, NUM_TOKENS)
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(2, range(NUM_TOKENS), target)
        assert sum(sender.bytes_sent for sender in prefill.senders) - before < 4096
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        await both_empty(prefill, decode)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "windows",
    [(16384, 16384), (CHUNK_BYTES, CHUNK_BYTES), (1 << 18, CHUNK_BYTES), (CHUNK_BYTES, 1 << 18)],
    ids=str,
)
async def test_windows_may_be_smaller_than_a_prompt_and_unequal(
    windows: tuple[int, int], is_late: bool
) -> None:
    """One slot is enough. A reader whose slot is smaller reads in parts; where copies take time, a
    slot serves nobody else before they are done."""
    device = LateDevice(is_held=False) if is_late else HostDevice()
    async with loopback(windows=windows, devices=(device, device)) as (prefill, decode):
        await connected(prefill, decode)
        for seed in (2, 3):
            assert await pull(prefill, decode, seed) < KV_BYTES
        assert queue_of(decode).window.slot_bytes == {16384: 4096, 1 << 18: 1 << 16}.get(
            windows[1], CHUNK_BYTES
        )
        await both_empty(prefill, decode)


async def test_only_missing_tokens_are_read() -> None:
    async with loopback(SHAPE, layout(block_size=64)) as (prefill, decode):
        await connected(prefill, decode)
        await only_missing_tokens_come(prefill, decode)


async def test_pulls_that_compete_for_one_slot_all_get_it() -> None:
    """Also those of prompts that are not computed yet: they hold no slot."""
    async with loopback(windows=(CHUNK_BYTES, CHUNK_BYTES)) as (prefill, decode):
        await connected(prefill, decode)
        waiting = new_transfer_id()
        decode.pull(prefill.peer, waiting, 16)
        prefill.export(waiting, 16)
        moves = [await pulled_then_exported(prefill, decode, seed, 60) for seed in (2, 3, 4, 5)]
        for seed, (transfer_id, target) in zip((2, 3, 4, 5), moves, strict=True):
            await decode.until_all(RECEIVED, transfer_id)
            decode.check(seed, range(60), target)
            decode.release(prefill.peer, transfer_id)
            await prefill.until_all(RELEASED, transfer_id)
        prefill.abort(waiting)
        await decode.until_all(FAILED, waiting)
        await both_empty(prefill, decode)


async def test_blocks_are_kept_until_the_export_ends() -> None:
    async with loopback() as (prefill, decode):
        await connected(prefill, decode)
        transfer_id, _ = await pulled_then_exported(prefill, decode, 3, NUM_TOKENS)
        await decode.until_all(RECEIVED, transfer_id)
        assert prefill.count(STAGED, transfer_id) == 0, "a repeat would need them"
        assert prefill.staged_bytes == 0
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        assert prefill.count(STAGED, transfer_id) == 1


async def test_what_has_left_its_blocks_comes_over_the_stream() -> None:
    async with loopback() as (prefill, decode):
        await connected(prefill, decode)
        transfer_id = prefill.export_computed(6, NUM_TOKENS)
        await prefill.until_all(STAGED, transfer_id)
        before = prefill.senders[0].bytes_sent
        target = decode.pull(prefill.peer, transfer_id, NUM_TOKENS)
        await decode.until_all(RECEIVED, transfer_id)
        assert prefill.senders[0].bytes_sent - before > KV_BYTES
        decode.check(6, range(NUM_TOKENS), target)


# The ways to each other ---------------------------------------------------------------------------


async def test_who_is_not_read_for_long_is_forgotten_and_met_anew() -> None:
    """Nodes that are started again have other names: connections to the old ones would stay."""
    async with loopback() as (prefill, decode):
        (reader,) = consumers(decode)
        for _ in range(2):
            await connected(prefill, decode)
            assert await pull(prefill, decode, 2) < KV_BYTES // 4
            reader.close_idle(60.0)
            assert len(reader.peers) == 1
            reader.close_idle(0.0)
            assert len(reader.peers) == 0


async def test_a_peer_that_does_not_answer_is_read_over_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "CONNECT_S", 0.05)
    async with loopback() as (prefill, decode):
        for task in prefill._tasks:
            task.cancel()
        (reader,) = consumers(decode)
        await pull(prefill, decode, 1)
        (peer,) = reader.peers
        await until(lambda: peer.first_word.waited_s > 0.05)
        for seed in (2, 3):
            await pull(prefill, decode, seed)
        assert peer.is_lost and "no answer" in peer.first_word.error
        assert sum("cannot be read through NIXL" in line for line in caplog.messages) == 1


async def test_a_peer_may_answer_as_late_as_this_process_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "CONNECT_S", 1.0)
    async with loopback() as (prefill, decode):
        (reader,) = consumers(decode)
        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "is_done", lambda _: False)
            await pull(prefill, decode, 1)
            await all_tasks_are_held_up(1.1)
            await pull(prefill, decode, 2)
            (peer,) = reader.peers
            assert not peer.is_lost
        await connected(prefill, decode)
        assert await pull(prefill, decode, 3) < KV_BYTES // 4


async def test_reads_may_take_as_long_as_their_process_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loopback(stall_timeout_s=0.6) as (prefill, decode):
        await connected(prefill, decode)
        held = HeldReads(monkeypatch)
        transfer_id, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
        await until(lambda: held.num_held > 0)
        await all_tasks_are_held_up(1.0)
        for _ in range(50):
            await asyncio.sleep(0)
        held.go()
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(4, range(NUM_TOKENS), target)


def _no_library(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(agent, "_MODULES", ("a_module_that_nobody_has",))
    return "pip install"


def _no_registration(patch: pytest.MonkeyPatch) -> str:
    def refuses(*_: object) -> None:
        raise NixlError("1048576 bytes could not be registered: no locked memory")

    patch.setattr(NixlAgent, "register", refuses)
    return "no locked memory"


def _no_memory(patch: pytest.MonkeyPatch) -> str:
    def refuses(_: HostDevice, num_bytes: int) -> Mapping:
        raise DeviceError(f"cuMemAlloc_v2 failed: out of memory, {num_bytes} bytes")

    patch.setattr(HostDevice, "allocate", refuses)
    return "out of memory"


@pytest.mark.parametrize("lacks", [_no_library, _no_registration, _no_memory])
async def test_without_a_window_kv_comes_over_the_stream(
    lacks: Callable[[pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    why = lacks(monkeypatch)
    async with loopback() as (prefill, decode):
        for seed in (1, 2):
            assert await pull(prefill, decode, seed) > KV_BYTES
    for way in ("leave", "come"):
        lines = [line for line in caplog.messages if f"does not {way} through NIXL" in line]
        assert len(lines) == 1 and why in lines[0]


async def test_a_window_that_holds_no_chunk_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async with loopback(windows=(CHUNK_BYTES - 1, CHUNK_BYTES)) as (prefill, decode):
        assert await pull(prefill, decode, 1) > KV_BYTES
        assert prefill.senders[0].advertise("anybody").keys() == {0}
    assert "raise --kv-nixl-window-bytes" in caplog.text


async def test_chunks_that_are_longer_than_the_readers_slots_come_over_the_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = loopback(windows=(1 << 16, 1024))
    pair.consumer.close_caches()
    pair.consumer = LoopbackConsumer(replace(pair.consumer.config, chunk_bytes=1024), SHAPE)
    async with pair as (prefill, decode):
        assert queue_of(decode).window.slot_bytes == 1024
        for seed in (1, 2):
            assert await pull(prefill, decode, seed) > KV_BYTES
    assert sum("do not fit into the 1024 bytes" in line for line in caplog.messages) == 1


async def test_adverts_that_make_no_sense_are_not_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with loopback() as (prefill, decode):
        (one,) = consumers(decode)
        meta = RecvMeta(new_transfer_id(), 0, prefill.peer, ([1],), 0, 16)
        job = FetchJob(meta, PullSource(0, 1, 0, SHAPE.share(0, 0, 1)), 0, 1)
        foreign = NixlAdvert(b"junk", 1 << 40, 4, 4096, None, 1 << 41, 2048)
        for advert in (b"", b"\xc1", msgspec.msgpack.encode(foreign)):
            assert one.fetch(job, advert) is None
        assert "cannot be reached" in caplog.text
        for field in ("address", "num_slots", "slot_bytes", "leases", "chunk_bytes"):
            wrong = msgspec.structs.replace(foreign, **{field: 0})
            assert one.fetch(job, msgspec.msgpack.encode(wrong)) is None
        assert len(one.peers) == 1
        assert sum("described its window wrongly" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("transports", ["nixl,stream", "cuda_ipc, nixl, stream"])
def test_nixl_and_tls_exclude_each_other(transports: str) -> None:
    """NIXL would move in the clear what the certificates are there to hide."""
    security = SecurityConfig(tls_cert_file="a", tls_key_file="b", tls_ca_file="c")
    with pytest.raises(SecurityError, match="NIXL moves KV in the clear"):
        KVTransferConfig(kv_role="kv_producer", transports=transports, security=security)


def test_ucx_uses_the_interfaces_of_kv_and_every_rdma_device(tmp_path: Path) -> None:
    """Left to itself it would listen on all of them."""
    (tmp_path / "class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    assert network_devices(["127.0.0.1"], tmp_path) == ["lo", "mlx5_0:1"]
