"""An assembler takes each of its chunks once, nothing else, and writes only what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from kv_caches import RankCache, layout, prompt_kv

from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import HeadRange
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import KVPeer, RecvMeta
from kv_transfer.transports.chunk_assembler import ChunkAssembler, PullSource
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
    yield ChunkAssembler(meta, PullSource(0, 1, 0, SHARE), view, 0, 1)
    view.close()


def chunk(layer: int, first: int, count: int, /, **changes: object) -> Chunk:
    """Of a grid with two blocks in each chunk."""
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


HOLD = 5, 77


def named(assembler: ChunkAssembler, *words: int) -> Chunk:
    """A message that names blocks of a peer whose cache is our own."""
    assembler.peer_cache = assembler._cache
    header = ChunkHeader(
        kind=ChunkKind.BLOCKS,
        transfer_id="ab" * 16,
        attempt=2,
        shape=shape_code(*SHARE),
        chunk_bytes=2 * SHAPE.page_bytes,
    )
    return decode_chunk(np.frombuffer(encode_chunk(header, [np.array(words, "<u4")]), np.uint8))


def test_several_chunks_are_named_at_once(cache: RankCache, assembler: ChunkAssembler) -> None:
    """Group 0 has one block that was asked for, group 1 two; the layers share them."""
    for layer in (0, 1):
        cache.write(1, layer, range(64), [0, 2, 4, 6])
    assert assembler.accept(named(assembler, *HOLD, 3, 1, 2, 0, 2, 4, 6)) == 4 * SHAPE.page_bytes
    assert assembler.missing == [3]
    assembler.accept(named(assembler, *HOLD, 1, 3, 4, 6))
    assert assembler.missing == [] and assembler.hold == HOLD
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
    cache: RankCache, assembler: ChunkAssembler, words: tuple[int, ...]
) -> None:
    before = cache.words.copy()
    for message in (words, (*HOLD, *words)):
        with pytest.raises(CorruptChunk):
            assembler.accept(named(assembler, *message))
    np.testing.assert_array_equal(cache.words, before)
    assert assembler.missing in (None, [0, 1, 2, 3])
    assert assembler.hold is None


def test_a_stream_names_blocks_of_one_transfer_only(assembler: ChunkAssembler) -> None:
    assembler.accept(named(assembler, *HOLD, 1, 3, 4, 6))
    with pytest.raises(CorruptChunk, match="two transfers"):
        assembler.accept(named(assembler, 5, 78, 1, 1, 4, 6))


def test_names_of_a_cache_that_is_not_mapped_are_refused(assembler: ChunkAssembler) -> None:
    message = named(assembler, *HOLD, 1, 1, 4, 6)
    assembler.peer_cache = None
    with pytest.raises(CorruptChunk, match="not mapped"):
        assembler.accept(message)
