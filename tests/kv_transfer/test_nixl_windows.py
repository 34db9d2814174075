"""Slots of windows have one owner each, chunks lie in them as both ends compute it, and messages
about them that make no sense change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_caches import RankCache, full_and_window
from kv_loopback import until
from memory_agent import MemoryAgent, memory_window, peer_of, queue_into, write
from one_job import BLOCK_IDS, FIRST_TOKEN, JOB, NUM_TOKENS, SHAPE, SHARE

from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.device import DeviceError
from kv_transfer.memory.devices.host_device import HostDevice
from kv_transfer.transports.base import TransportId
from kv_transfer.transports.group_target import GroupTarget
from kv_transfer.transports.in_place.read_leases import NUM_LEASES, ReadLeases
from kv_transfer.transports.nixl.packed_chunks import chunk_sizes, num_that_fit, packed_blocks
from kv_transfer.transports.nixl.window import FairSlots, open_window
from kv_transfer.transports.nixl.window_assembler import WindowAssembler
from kv_transfer.transports.nixl.window_message import (
    WindowMessage,
    notice_of,
    read_notice,
    read_window_message,
)
from kv_transfer.wire.chunk import Chunk, ChunkHeader, ChunkKind, shape_code
from kv_transfer.wire.chunk_grid import ChunkGrid

PAGE = SHAPE.page_bytes
CHUNK = 2 * PAGE
"""Each layer has two chunks, of one block that was asked for and of two."""


# Slots --------------------------------------------------------------------------------------------


class Owners(RuleBasedStateMachine):
    """Many ask for few slots, some leave again."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = FairSlots(2)
        self.held: list[tuple[int, int]] = []
        """Pairs (who, slot)."""
        self.waiting: list[int] = []
        self.takes_at_once: set[int] = set()

    def _ask(self, who: int) -> None:
        is_its_turn = bool(self.slots.num_free) and self.waiting[:1] in ([], [who])
        if is_its_turn:
            self.waiting = self.waiting[1:]
        elif who not in self.waiting:
            self.waiting.append(who)
        slot = self.slots.take(who, partial(self._wake, who))
        assert (slot is not None) == is_its_turn
        if slot is not None:
            self.held.append((who, slot))

    def _wake(self, who: int) -> None:
        assert self.waiting[0] == who
        if who in self.takes_at_once:
            self._ask(who)

    @rule(who=st.integers(0, 5))
    def ask(self, who: int) -> None:
        self._ask(who)

    @rule(who=st.integers(0, 5))
    def takes_when_it_is_woken(self, who: int) -> None:
        self.takes_at_once ^= {who}

    @rule(who=st.integers(0, 5))
    def leave(self, who: int) -> None:
        self.waiting = [other for other in self.waiting if other != who]
        self.slots.leave(who)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        _, slot = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.slots.give_back(slot)

    @invariant()
    def each_slot_has_one_owner(self) -> None:
        held = [slot for _, slot in self.held]
        assert len(set(held)) == len(held) == self.slots.num_slots - self.slots.num_free
        assert self.slots.num_waiting == len(self.waiting)
        for who in range(6):
            beside = any(other != who for other in self.waiting)
            assert self.slots.is_awaited_beside(who) == beside

    def teardown(self) -> None:
        for who in list(self.waiting):
            self.leave(who)
        for _, slot in self.held:
            self.slots.give_back(slot)
        assert (self.slots.num_free, self.slots.num_waiting) == (2, 0)


Owners.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_each_slot_has_one_owner_and_nobody_overtakes = Owners.TestCase


@pytest.mark.parametrize(
    ("window_bytes", "longest", "expected"),
    [
        (256 << 20, 2 << 20, (16, 16 << 20)),
        (64 << 20, 2 << 20, (4, 16 << 20)),
        (32 << 20, 2 << 20, (4, 8 << 20)),
        (8 << 20, 4 << 20, (2, 4 << 20)),
        (5000, 5000, (1, 5000)),
        (256 << 20, 100 << 20, (2, 100 << 20)),
    ],
)
def test_a_window_is_cut_into_slots_that_hold_a_chunk(
    window_bytes: int, longest: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transports.nixl.window.NixlAgent", lambda hosts: MemoryAgent())
    config = KVTransferConfig(kv_role="kv_producer", nixl_window_bytes=window_bytes)
    window = open_window(config, HostDevice(), longest)
    assert (window.slots.num_slots, window.slot_bytes) == expected
    window.close()


# How chunks lie in them ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, full_and_window(tp_size=2)], ids=["one", "two groups"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_lie_one_behind_the_other(shape: KVLayout, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 200))
    first = data.draw(st.integers(0, num_tokens - 1))
    grid = ChunkGrid.of(shape, data.draw(st.integers(1, 8000)), first, num_tokens)
    share = shape.share(0, 0, 1)
    wanted = st.lists(st.sampled_from(sorted(grid.stripe(0, 1))), min_size=1, unique=True)
    indices = data.draw(wanted)
    expected, sizes, offset = set(), [], 0
    for index in indices:
        place = grid.position(index)
        for block in grid.blocks_of(place):
            expected.add((place.group, place.layer, block, offset))
            offset += share[place.group].num_bytes
        sizes.append(offset - sum(sizes))
    assert chunk_sizes(grid, share, np.array(indices)).tolist() == sizes
    found = {
        (blocks.group, *one)
        for blocks in packed_blocks(grid, share, np.array(indices))
        for one in zip(
            blocks.layers.tolist(), blocks.numbers.tolist(), blocks.offsets.tolist(), strict=True
        )
    }
    assert found == expected


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 200))
def test_as_many_as_fit(sizes: list[int], room: int) -> None:
    count = num_that_fit(np.array(sizes, np.int64), room)
    assert sum(sizes[:count]) <= room
    assert count == len(sizes) or sum(sizes[: count + 1]) > room


# What the ends say to each other ------------------------------------------------------------------

words = st.integers(0, (1 << 32) - 1)


@given(
    words,
    st.integers(0, NUM_LEASES - 1),
    st.integers(1, (1 << 32) - 1),
    st.lists(words, min_size=1),
)
def test_messages_say_what_they_said(
    slot: int, lease: int, number: int, indices: list[int]
) -> None:
    message = WindowMessage(slot, (lease, number), np.array(indices))
    found = read_window_message(message.words().view(np.uint8))
    assert (found.slot, found.lease, found.indices.tolist()) == (slot, (lease, number), indices)
    assert read_notice(notice_of(found.lease)) == (lease, number)


@given(st.binary(max_size=12))
def test_what_is_no_notice_is_none(notice: bytes) -> None:
    assert (read_notice(notice) is None) == (len(notice) != 8)


@pytest.fixture
def cache() -> Iterator[RankCache]:
    cache = RankCache(SHAPE, 0, 8)
    yield cache
    cache.close()


class Reader:
    """One stream of a transfer, and the window that it reads, which has two slots of two chunks."""

    def __init__(self, cache: RankCache, slot_bytes: int = 2 * CHUNK) -> None:
        self.leases = ReadLeases()
        self.lease = self.leases.take()
        self.theirs = memory_window(2, 2 * CHUNK)
        self.agent = MemoryAgent()
        self.window = memory_window(2, slot_bytes)
        self.queue = queue_into(self.window)
        self.view = KVCacheView(cache.handle, SHAPE)
        peer = peer_of(self.theirs, self.leases)
        self.peer = peer
        peer.num_users = 1
        self.came: list[int] = []
        self.assembler = WindowAssembler(JOB, self.view, TransportId.NIXL, peer, self.queue, 1.0)
        self.assembler.on_kv = self.came.append

    @property
    def given_notices(self) -> list[bytes]:
        assert isinstance(self.window.agent, MemoryAgent)
        return self.window.agent.given

    def message(self, *numbers: int, **changes: object) -> Chunk:
        fields = {
            "kind": ChunkKind.WINDOW,
            "transfer_id": "ab" * 16,
            "attempt": 2,
            "shape": shape_code(*SHARE),
            "chunk_bytes": CHUNK,
            **changes,
        }
        payload = np.array(numbers, "<u4").view(np.uint8)
        return Chunk(ChunkHeader(**fields), payload)  # type: ignore[arg-type]

    def told(self, *indices: int, slot: int = 0) -> Chunk:
        return self.message(slot, self.lease.slot, self.lease.number, len(indices), *indices)

    def put(
        self, slot: int, cache: RankCache, layers_and_blocks: list[tuple[int, list[int]]]
    ) -> None:
        """Fills a slot of the peer with blocks of this cache."""
        pages = [
            cache.pages[layer, block].tobytes() for layer, ids in layers_and_blocks for block in ids
        ]
        write(self.theirs, slot, b"".join(pages))

    def close(self) -> None:
        self.assembler.stop()
        self.assembler.close()
        assert self.peer.num_users == 0
        assert self.queue.is_empty()
        self.queue.close()
        self.view.close()


@pytest.mark.parametrize(
    "slot_bytes", [2 * CHUNK, CHUNK], ids=["one read", "a read for each chunk"]
)
async def test_what_a_message_tells_of_is_read_and_copied(
    cache: RankCache, slot_bytes: int
) -> None:
    source = RankCache(SHAPE, 0, 8)
    for layer in (0, 1):
        source.write(1, layer, range(64), [0, 2, 4, 6])
    reader = Reader(cache, slot_bytes)
    reader.put(0, source, [(0, [4, 6]), (0, [2]), (1, [2])])
    reader.put(1, source, [(1, [4, 6])])
    assert reader.assembler.accept(reader.told(1, 0, 2)) == 0
    assert reader.assembler.missing == [0, 1, 2, 3], "nothing is here yet"
    await reader.assembler.arrived()
    assert reader.assembler.missing == [3] and sum(reader.came) == 4 * PAGE
    reader.assembler.accept(reader.told(3, slot=1))
    await reader.assembler.arrived()
    assert reader.assembler.missing == []
    assert reader.given_notices == [notice_of((reader.lease.slot, reader.lease.number))] * 2
    cache.check(1, range(FIRST_TOKEN, NUM_TOKENS), BLOCK_IDS)
    reader.close()
    source.close()


NONSENSE = {
    "empty": (),
    "cut off": (0, 0, 1),
    "no chunk": (0, 0, 1, 0),
    "more chunks than it says": (0, 0, 1, 1, 0, 1),
    "fewer chunks than it says": (0, 0, 1, 2, 0),
    "a slot that is not there": (2, 0, 1, 1, 0),
    "more than a slot holds": (0, 0, 1, 3, 0, 1, 3),
    "a chunk twice": (0, 0, 1, 2, 1, 1),
    "a chunk that is not there": (0, 0, 1, 1, 4),
    "a lease that is not there": (0, NUM_LEASES, 1, 1, 0),
    "nobody's lease": (0, 0, 0, 1, 0),
}


@pytest.mark.parametrize("numbers", NONSENSE.values(), ids=NONSENSE.keys())
async def test_messages_that_make_no_sense_change_nothing(
    cache: RankCache, numbers: tuple[int, ...]
) -> None:
    reader, before = Reader(cache), cache.words.copy()
    with pytest.raises(CorruptChunk):
        reader.assembler.accept(reader.message(*numbers))
    np.testing.assert_array_equal(cache.words, before)
    assert reader.queue.is_empty() and reader.assembler.missing in (None, [0, 1, 2, 3])
    reader.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": ChunkKind.DATA},
        {"kind": ChunkKind.BLOCKS},
        {"attempt": 1},
        {"transfer_id": "cd" * 16},
        {"shape": 1},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 20},
    ],
    ids=str,
)
async def test_messages_of_others_change_nothing(
    cache: RankCache, changes: dict[str, object]
) -> None:
    """The last one says that a chunk is longer than a slot of ours."""
    reader, before = Reader(cache, CHUNK), cache.words.copy()
    right = (0, reader.lease.slot, reader.lease.number, 1, 1)
    with pytest.raises(CorruptChunk):
        reader.assembler.accept(reader.message(*right, **changes))
    np.testing.assert_array_equal(cache.words, before)
    assert reader.queue.is_empty()
    reader.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5) | words, max_size=9))
def test_whatever_is_said_nothing_is_left_behind(numbers: list[int]) -> None:
    """A lease that is not the peer's any more is all that it can be by chance."""

    async def run() -> None:
        cache = RankCache(SHAPE, 0, 8)
        reader, before = Reader(cache), cache.words.copy()
        reader.lease.release()
        try:
            reader.assembler.accept(reader.message(*numbers))
            await reader.assembler.arrived()
        except (CorruptChunk, PeerLost):
            np.testing.assert_array_equal(cache.words, before)
        else:
            raise AssertionError("what was said made sense")
        reader.close()
        cache.close()

    asyncio.run(run())


async def test_a_chunk_that_is_on_its_way_is_not_told_of_twice(cache: RankCache) -> None:
    reader = Reader(cache)
    reader.assembler.accept(reader.told(0, 1))
    with pytest.raises(CorruptChunk, match="twice"):
        reader.assembler.accept(reader.told(1, slot=1))
    await reader.assembler.arrived()
    with pytest.raises(CorruptChunk, match="twice"):
        reader.assembler.accept(reader.told(1, slot=1))
    reader.close()


async def test_what_is_read_after_the_lease_does_not_count(cache: RankCache) -> None:
    reader, before = Reader(cache), cache.words.copy()
    message = reader.told(0, 1)
    reader.lease.release()
    reader.assembler.accept(message)
    with pytest.raises(PeerLost, match="p: it let go"):
        await reader.assembler.arrived()
    with pytest.raises(PeerLost):
        reader.assembler.check_on_the_way()
    np.testing.assert_array_equal(cache.words, before)
    assert reader.assembler.missing == [0, 1, 2, 3] and not reader.peer.is_lost
    reader.close()


async def test_nothing_is_copied_after_a_stop(cache: RankCache) -> None:
    """Also what waits for a slot is withdrawn."""
    reader, before = Reader(cache), cache.words.copy()
    for slot, chunk in enumerate((0, 1, 2)):
        reader.assembler.accept(reader.told(chunk, slot=slot % 2))
    assert reader.peer.memory.turns.num_waiting == 1
    reader.assembler.stop()
    assert reader.peer.memory.turns.num_waiting == 0
    while not reader.queue.is_empty():
        await asyncio.sleep(0)
    np.testing.assert_array_equal(cache.words, before)
    assert reader.came == [] and not reader.peer.is_lost
    reader.close()


async def test_a_device_that_fails_is_not_passed_over(
    cache: RankCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the copies of what was read, so their error must find its own way."""
    reader = Reader(cache)
    told: list[BaseException] = []
    reader.queue._on_error = told.append

    def fails(*_: object, **__: object) -> None:
        raise DeviceError("cuMemcpyAsync failed")

    monkeypatch.setattr(GroupTarget, "copy_compact", fails)
    reader.assembler.accept(reader.told(0, 1))
    await until(lambda: bool(told))
    assert isinstance(told[0], DeviceError)
    reader.assembler.stop()
    reader.assembler.close()
    reader.view.close()
