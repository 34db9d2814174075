"""`BlockStore` loses no area for headers around a library that fails."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.memory.pool.block_header import BlockHeaders
from kv_transfer.memory.pool.block_store import BlockStore, StoreAway
from kv_transfer.memory.pool.slot_memory import SlotMemory
from kv_transfer.memory.pool.store_address import StoreAddress
from kv_transfer.memory.pool.store_calls import StoreCalls
from kv_transfer.memory.pool.store_parts import StorePart

NAMES = [b"a" * 32]


class Library:
    """Has no block that is asked for, or one that is damaged and cannot be removed."""

    def __init__(self) -> None:
        self.is_damaged = False

    def batch_get_into_multi_buffers(self, keys: list[str], *places: object) -> list[int]:
        return [1 if self.is_damaged else -1 for _ in keys]

    def remove(self, key: str, is_forced: bool) -> None:
        raise StoreAway("no answer")

    def close(self) -> None: ...


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def store(library: Library, monkeypatch: pytest.MonkeyPatch) -> BlockStore:
    part = StorePart("tandem/x", (0,), BlockHeaders(b"x" * 32, 1))
    memory = SlotMemory.anonymous(2, 1, 4096)
    store = BlockStore(StoreAddress("127.0.0.1:1"), "127.0.0.1", [part], memory)
    monkeypatch.setattr(store, "connect", lambda: None)
    store._clients = [library]
    store._idle.put(library)
    return store


def num_free(store: BlockStore) -> int:
    return store._areas.qsize()


def test_an_area_comes_back_when_a_check_fails(store: BlockStore, library: Library) -> None:
    before = num_free(store)
    library.is_damaged = True
    brought = store.get([(NAMES[0], 0)])
    assert num_free(store) == before - 1
    with pytest.raises(StoreAway):
        store.check(brought)
    assert num_free(store) == before


@pytest.mark.asyncio
async def test_an_area_comes_back_when_its_reader_is_cancelled(store: BlockStore) -> None:
    calls = StoreCalls(store, lambda why: None)
    before = num_free(store)
    try:
        for _ in range(before + 1):
            reading = asyncio.create_task(calls.read(NAMES, [0]))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        failed = await asyncio.wait_for(calls.read(NAMES, [0]), 30)
        assert failed == [0]
        assert num_free(store) == before
    finally:
        calls.close()
