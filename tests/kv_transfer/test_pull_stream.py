"""One stream: what a sender announces is compared with what can be meant before memory is taken."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from unittest.mock import create_autospec

import pytest
from kv_caches import RankCache, layout

from kv_transfer.errors import CorruptChunk
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import KVPeer, RecvMeta
from kv_transfer.transports.fetch_job import FetchJob, PullSource
from kv_transfer.transports.pull_stream import PullStream
from kv_transfer.transports.stream.consumer import StreamAssembler
from kv_transfer.wire.chunk import HEADER
from kv_transfer.wire.chunk_grid import MAX_CHUNK_BYTES
from kv_transfer.wire.pull_client import PullClient

SHAPE = layout(num_layers=2)


@pytest.fixture
def stream() -> Iterator[PullStream]:
    cache = RankCache(SHAPE, 0, 8)
    view = KVCacheView(cache.handle, SHAPE)
    peer = KVPeer(engine_id="p", epoch=1, layout=SHAPE)
    meta = RecvMeta("ab" * 16, 2, peer, ([7, 3, 5, 1],), 0, 60)
    source = PullSource(0, 1, 0, SHAPE.share(0, 0, 1))
    assembler = StreamAssembler(FetchJob(meta, source, 0, 1), view)
    client = create_autospec(PullClient, instance=True)
    yield PullStream(assembler, client, "peer:1", 0, lambda _: None, lambda: None)
    view.close()
    cache.close()


@pytest.mark.parametrize("num_bytes", [HEADER.size + MAX_CHUNK_BYTES + 1, 128 << 20, 2**32 - 1])
def test_a_message_that_is_announced_as_huge_costs_no_memory(
    stream: PullStream, num_bytes: int
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunk, match=f"peer:1 announced {num_bytes} bytes"):
            stream.begin(bytes(HEADER.size), num_bytes)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_chunk_that_can_be_is_received(stream: PullStream) -> None:
    (view,) = stream.begin(bytes(HEADER.size), HEADER.size + MAX_CHUNK_BYTES)
    assert len(view) == MAX_CHUNK_BYTES
