"""Messages that name blocks of a peer's cache: all of their chunks are copied, or none."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import create_autospec

import msgspec
import numpy as np
import pytest
from kv_caches import RankCache
from one_job import BLOCK_IDS, FIRST_TOKEN, JOB, NUM_TOKENS, SHAPE, SHARE

from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.host_device import HostDevice
from kv_transfer.transports.base import TransportId
from kv_transfer.transports.cuda_ipc.advert import CacheAdvert
from kv_transfer.transports.cuda_ipc.consumer import CudaIpcConsumer, MappedBlocks
from kv_transfer.transports.cuda_ipc.local_frames import LocalAddress
from kv_transfer.transports.cuda_ipc.peer_caches import PeerCaches
from kv_transfer.transports.in_place.names_assembler import NamesAssembler
from kv_transfer.transports.in_place.read_leases import ReadLeases
from kv_transfer.wire.chunk import (
    Chunk,
    ChunkHeader,
    ChunkKind,
    decode_chunk,
    encode_chunk,
    shape_code,
)
from kv_transfer.wire.pull_client import PullClient


@pytest.fixture
def cache() -> Iterator[RankCache]:
    cache = RankCache(SHAPE, 0, 8)
    yield cache
    cache.close()


@pytest.fixture
def leases() -> ReadLeases:
    return ReadLeases()


@pytest.fixture
def assembler(cache: RankCache, leases: ReadLeases) -> Iterator[NamesAssembler]:
    """Its peer's cache is our own."""
    view = KVCacheView(cache.handle, SHAPE)
    peer = MappedBlocks(view, PeerCaches(HostDevice()), leases.file)
    yield NamesAssembler(JOB, view, TransportId.CUDA_IPC, peer)
    view.close()


LEASE = 5, 77


def named(*words: int) -> Chunk:
    header = ChunkHeader(
        kind=ChunkKind.BLOCKS,
        transfer_id="ab" * 16,
        attempt=2,
        shape=shape_code(*SHARE),
        chunk_bytes=2 * SHAPE.page_bytes,
    )
    return decode_chunk(np.frombuffer(encode_chunk(header, [np.array(words, "<u4")]), np.uint8))


def test_several_chunks_are_named_at_once(cache: RankCache, assembler: NamesAssembler) -> None:
    """Group 0 has one block that was asked for, group 1 two; the layers share them."""
    for layer in (0, 1):
        cache.write(1, layer, range(64), [0, 2, 4, 6])
    assert assembler.accept(named(*LEASE, 3, 1, 2, 0, 2, 4, 6)) == 4 * SHAPE.page_bytes
    assert assembler.missing == [3]
    assembler.accept(named(*LEASE, 1, 3, 4, 6))
    assert assembler.missing == [] and assembler._lease == LEASE
    cache.check(1, range(FIRST_TOKEN, NUM_TOKENS), BLOCK_IDS)


@pytest.mark.parametrize(
    "words",
    [
        (),
        (0,),
        (0, 4, 6),
        (1,),
        (9, 1, 4, 6),
        (1, 1),
        (1, 1, 4),
        (1, 1, 4, 6, 0),
        (2, 0, 1, 4, 6),
        (2, 1, 1, 4, 6),
        (1, 4, 4, 6),
        (1, 1, 4, 8),
    ],
    ids=str,
)
def test_names_that_make_no_sense_change_nothing(
    cache: RankCache, assembler: NamesAssembler, words: tuple[int, ...]
) -> None:
    before = cache.words.copy()
    for message in (words, (*LEASE, *words)):
        with pytest.raises(CorruptChunk):
            assembler.accept(named(*message))
    np.testing.assert_array_equal(cache.words, before)
    assert assembler.missing in (None, [0, 1, 2, 3])
    assert assembler._lease is None


def test_a_stream_names_blocks_of_one_transfer_only(assembler: NamesAssembler) -> None:
    assembler.accept(named(*LEASE, 1, 3, 4, 6))
    with pytest.raises(CorruptChunk, match="two transfers"):
        assembler.accept(named(5, 78, 1, 1, 4, 6))


def test_what_was_copied_counts_as_long_as_the_lease_lasts(
    assembler: NamesAssembler, leases: ReadLeases
) -> None:
    assembler.check()
    lease = leases.take()
    assembler.accept(named(lease.slot, lease.number, 1, 3, 4, 6))
    assembler.check()
    lease.release()
    with pytest.raises(PeerLost, match="let go"):
        assembler.check()


def test_kv_in_a_stream_of_names_is_refused(assembler: NamesAssembler) -> None:
    header = ChunkHeader(kind=ChunkKind.DATA, transfer_id="ab" * 16, attempt=2, chunk_bytes=64)
    message = decode_chunk(np.frombuffer(encode_chunk(header), np.uint8))
    with pytest.raises(CorruptChunk, match="DATA where names belong"):
        assembler.accept(message)


@pytest.mark.parametrize("advertised", [b"", b"\xc1", b"\x93\xa0\x80\x90"])
def test_a_peer_that_describes_its_cache_wrongly_is_read_another_way(
    cache: RankCache, advertised: bytes
) -> None:
    view = KVCacheView(cache.handle, SHAPE)
    consumer = CudaIpcConsumer(view)
    assert consumer.fetch(JOB, advertised) is None
    consumer.close()
    view.close()


async def test_local_calls_are_made_to_addresses_of_transfer_processes_alone(
    cache: RankCache, leases: ReadLeases
) -> None:
    """A peer that names another socket of this host is called over the network. Processes that are
    not called any more are forgotten when others come."""
    view, network = KVCacheView(cache.handle, SHAPE), create_autospec(PullClient, instance=True)
    consumer = CudaIpcConsumer(view)

    def caller(calls: LocalAddress | None) -> PullClient:
        advert = CacheAdvert("here", cache.handle, leases.file, calls)
        return consumer.caller(msgspec.msgpack.encode(advert), network)

    ours = LocalAddress.new()
    assert caller(None) is network and consumer.caller(b"junk", network) is network
    assert caller(LocalAddress(1, "dbus", ours.key)) is network
    assert caller(LocalAddress(1, ours.name, b"short")) is network
    first = caller(ours)
    assert first is not network and caller(ours) is first
    caller(LocalAddress.new())
    assert len(consumer._callers) == 1
    consumer.close()
    view.close()
