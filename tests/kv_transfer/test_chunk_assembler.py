"""An assembler takes each of its chunks once, nothing else, and writes only what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from kv_caches import RankCache, layout, prompt_kv

from kv_transfer.errors import CorruptChunk
from kv_transfer.memory.block_views import BlockViews
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import KVPeer, RecvMeta
from kv_transfer.planes import HeadRange
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob, PullSource
from kv_transfer.transports.stream.consumer import StreamAssembler
from kv_transfer.wire.chunk import (
    Chunk,
    ChunkHeader,
    ChunkKind,
    decode_chunk,
    encode_chunk,
    shape_code,
)

SHAPE = layout(num_layers=2)
HEADS = HeadRange(0, 2)
SHARE = SHAPE.share(0, 0, 1)
NUM_TOKENS, FIRST_TOKEN = 60, 20
BLOCK_IDS = [7, 3, 5, 1]


@pytest.fixture
def cache() -> Iterator[RankCache]:
    cache = RankCache(SHAPE, 0, 8)
    yield cache
    cache.close()


@pytest.fixture
def assembler(cache: RankCache) -> Iterator[ChunkAssembler]:
    view = KVCacheView(cache.handle, SHAPE)
    peer = KVPeer(engine_id="p", epoch=1, layout=SHAPE)
    meta = RecvMeta("ab" * 16, 2, peer, (BLOCK_IDS,), FIRST_TOKEN, NUM_TOKENS)
    yield StreamAssembler(FetchJob(meta, PullSource(0, 1, 0, SHARE), 0, 1), view)
    view.close()


def chunk(layer: int, first: int, count: int, /, **changes: object) -> Chunk:
    """Returns a chunk of a grid with two blocks in each chunk."""
    header = ChunkHeader(
        kind=ChunkKind.DATA,
        transfer_id="ab" * 16,
        attempt=2,
        layer=layer,
        first_block=first,
        num_blocks=count,
        shape=shape_code(*SHARE),
        chunk_bytes=2 * SHAPE.page_bytes,
    )
    tokens = range(first * 16, (first + count) * 16)
    values = prompt_kv(1, layer, HEADS, tokens, SHAPE).reshape(2, 2, count, 16, 8)
    payload = np.ascontiguousarray(values.transpose(2, 0, 1, 3, 4))
    message = encode_chunk(replace(header, **changes), [payload])
    return decode_chunk(np.frombuffer(message, np.uint8))


def test_all_chunks_land(cache: RankCache, assembler: ChunkAssembler) -> None:
    assert assembler.missing is None
    for layer in (1, 0):
        assembler.accept(chunk(layer, 2, 2))
        assembler.accept(chunk(layer, 1, 1))
    assert assembler.missing == []
    cache.check(1, range(FIRST_TOKEN, NUM_TOKENS), BLOCK_IDS)
    assert cache.untouched_except(BLOCK_IDS)


def test_blocks_before_the_first_wanted_one_may_come_along(
    cache: RankCache, assembler: ChunkAssembler
) -> None:
    for layer in (0, 1):
        assembler.accept(chunk(layer, 0, 2))
        assembler.accept(chunk(layer, 2, 2))
    cache.check(1, range(FIRST_TOKEN, NUM_TOKENS), BLOCK_IDS)


@pytest.mark.parametrize(
    "foreign",
    [
        {"transfer_id": "cd" * 16},
        {"attempt": 1},
        {"attempt": 3},
        {"group": 1},
        {"shape": 0},
        {"shape": shape_code(*layout(num_kv_heads=1).share(0, 0, 1))},
        {"shape": shape_code(*layout(block_size=32).share(0, 0, 1))},
        {"layer": 2},
        {"first_block": 1},
        {"first_block": 4},
        {"first_block": 1000},
        {"num_blocks": 1},
        {"num_blocks": 3},
        {"chunk_bytes": 0},
        {"chunk_bytes": 3 * SHAPE.page_bytes},
    ],
    ids=str,
)
def test_a_foreign_chunk_changes_nothing(
    cache: RankCache, assembler: ChunkAssembler, foreign: dict[str, object]
) -> None:
    assembler.accept(chunk(1, 2, 2))
    before = cache.words.copy()
    missing = assembler.missing
    with pytest.raises(CorruptChunk):
        assembler.accept(chunk(0, 2, 2, **foreign))
    np.testing.assert_array_equal(cache.words, before)
    assert assembler.missing == missing


def test_layers_that_were_not_asked_for_are_refused(cache: RankCache) -> None:
    """A sender of 0.1 does not know that a stage may ask for some: it sends all that it has."""
    stage = layout(num_layers=1)
    view = KVCacheView(cache.handle, stage)
    peer = KVPeer(engine_id="p", epoch=1, layout=SHAPE)
    meta = RecvMeta("ab" * 16, 2, peer, (BLOCK_IDS,), FIRST_TOKEN, NUM_TOKENS)
    source = PullSource(0, 1, 0, SHARE, layers=range(1, 2), first_layer=1)
    assembler = StreamAssembler(FetchJob(meta, source, 0, 1), view, BlockViews(view))
    assembler.accept(chunk(1, 2, 2))
    before = cache.words.copy()
    foreign = chunk(0, 2, 2)
    with pytest.raises(CorruptChunk):
        assembler.place(foreign.header, foreign.payload.nbytes)
    with pytest.raises(CorruptChunk):
        assembler.accept(foreign)
    np.testing.assert_array_equal(cache.words, before)
    assert assembler.missing is not None and len(assembler.missing) == 1
    del assembler
    view.close()


def test_a_second_copy_is_refused(cache: RankCache, assembler: ChunkAssembler) -> None:
    assembler.accept(chunk(0, 2, 2))
    with pytest.raises(CorruptChunk, match="twice"):
        assembler.accept(chunk(0, 2, 2))
    assert assembler.missing is not None and len(assembler.missing) == 3


def test_the_end_of_another_stream_is_refused(assembler: ChunkAssembler) -> None:
    assembler.end(chunk(0, 0, 0, kind=ChunkKind.END))
    assert assembler.missing == [0, 1, 2, 3]
    with pytest.raises(CorruptChunk):
        assembler.end(chunk(0, 0, 0, kind=ChunkKind.END, attempt=0))
    with pytest.raises(CorruptChunk):
        assembler.end(chunk(0, 0, 0, kind=ChunkKind.END, chunk_bytes=4 * SHAPE.page_bytes))
