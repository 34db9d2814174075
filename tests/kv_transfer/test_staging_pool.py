"""The staging pool never gives a slot to two chunks and never displaces what somebody needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.errors import StagingFull
from kv_transfer.memory.staging import StagedChunk, StagingPool

SLOTS, SLOT_BYTES, RESERVE = 6, 16, 2


class PoolMachine(RuleBasedStateMachine):
    """Every chunk's slot is filled with a number of its own, which must stay while it matters."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StagingPool(SLOTS * SLOT_BYTES + 5, SLOT_BYTES, RESERVE)
        self.taken: list[StagedChunk] = []
        self.needed: list[StagedChunk] = []
        self.sent: list[StagedChunk] = []
        self.pinned: list[StagedChunk] = []
        self.stamps: dict[StagedChunk, int] = {}

    def in_use(self) -> list[StagedChunk]:
        chunks = self.taken + self.needed + [c for c in self.sent if c.message is not None]
        return list({id(chunk): chunk for chunk in chunks + self.pinned}.values())

    @rule(num_bytes=st.integers(1, SLOT_BYTES), is_awaited=st.booleans())
    def take(self, num_bytes: int, is_awaited: bool) -> None:
        stuck = [c for c in self.in_use() if c not in self.sent or c.num_pins]
        chunk = self.pool.take(num_bytes, is_awaited)
        assert (chunk is not None) == (SLOTS - len(stuck) > (0 if is_awaited else RESERVE))
        if chunk is not None:
            self.stamps[chunk] = len(self.stamps) % 251
            chunk.buffer[:] = self.stamps[chunk]
            self.taken.append(chunk)

    @precondition(lambda self: self.taken)
    @rule()
    def publish(self) -> None:
        chunk = self.taken.pop(0)
        assert chunk.message is None
        self.pool.publish(chunk)
        self.needed.append(chunk)

    @precondition(lambda self: self.needed)
    @rule(data=st.data())
    def mark_sent(self, data: st.DataObject) -> None:
        chunk = self.needed.pop(data.draw(st.integers(0, len(self.needed) - 1)))
        self.pool.mark_sent(chunk)
        self.sent.append(chunk)

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.in_use()))
        self.pool.pin(chunk)
        self.pinned.append(chunk)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pool.unpin(self.pinned.pop(0))

    @precondition(lambda self: self.taken or self.needed or self.sent)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        owners = [chunks for chunks in (self.taken, self.needed, self.sent) if chunks]
        chunk = data.draw(st.sampled_from(owners)).pop()
        self.pool.drop(chunk)
        self.pool.drop(chunk)
        assert chunk.message is None

    @invariant()
    def slots_and_counts_are_right(self) -> None:
        held = self.in_use()
        assert len({chunk.slot for chunk in held}) == len(held)
        assert self.pool.used == sum(chunk.num_bytes for chunk in held)
        assert all((chunk.buffer == self.stamps[chunk]).all() for chunk in held)
        assert all(chunk.message is not None for chunk in self.needed)

    def teardown(self) -> None:
        for chunk in self.taken + self.needed + self.sent:
            self.pool.drop(chunk)
        while self.pinned:
            self.pool.unpin(self.pinned.pop())
        assert self.pool.used == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def published(pool: StagingPool, num_bytes: int = 10) -> StagedChunk:
    chunk = pool.take(num_bytes, is_awaited=True)
    assert chunk is not None
    pool.publish(chunk)
    return chunk


def test_the_longest_sent_goes_first() -> None:
    pool = StagingPool(30, 10)
    chunks = [published(pool) for _ in range(3)]
    assert pool.take(10, is_awaited=True) is None
    pool.mark_sent(chunks[1])
    pool.mark_sent(chunks[0])
    assert pool.take(10, is_awaited=True) is not None
    assert [chunk.message is None for chunk in chunks] == [False, True, False]
    assert pool.num_displaced == 1


def test_a_pinned_slot_is_given_to_nobody() -> None:
    pool = StagingPool(10, 10)
    chunk = published(pool)
    pool.pin(chunk)
    pool.mark_sent(chunk)
    assert pool.take(10, is_awaited=True) is None
    pool.drop(chunk)
    assert pool.used == 10
    assert pool.take(10, is_awaited=True) is None
    pool.unpin(chunk)
    assert pool.used == 0
    assert pool.take(10, is_awaited=True) is not None


def test_slots_lie_apart_in_one_arena() -> None:
    pool = StagingPool(64, 16)
    chunks = [published(pool, 16) for _ in range(4)]
    for value, chunk in enumerate(chunks):
        chunk.buffer[:] = value
    assert np.unique(pool.memory).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("capacity", [99, 50])
def test_what_can_never_fit_says_so(capacity: int) -> None:
    pool = StagingPool(capacity, 60)
    with pytest.raises(StagingFull, match="staging_bytes"):
        pool.take(61, is_awaited=True)
    if pool.num_slots == 0:
        with pytest.raises(StagingFull, match="staging_bytes"):
            pool.take(1, is_awaited=True)
    with pytest.raises(ValueError, match="reserve"):
        StagingPool(capacity, 60, 2)
