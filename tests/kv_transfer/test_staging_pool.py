"""The staging pool never exceeds its capacity and never displaces what somebody still needs."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.errors import StagingFull
from kv_transfer.staging import StagedChunk, StagingPool

CAPACITY, RESERVE = 1000, 300


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = StagingPool(CAPACITY, RESERVE)
        self.credits: list[int] = []
        self.needed: list[StagedChunk] = []
        self.sent: list[StagedChunk] = []

    @rule(num_bytes=st.integers(1, CAPACITY), is_awaited=st.booleans())
    def take_credit(self, num_bytes: int, is_awaited: bool) -> None:
        limit = CAPACITY if is_awaited else CAPACITY - RESERVE
        needed = sum(self.credits) + sum(chunk.num_bytes for chunk in self.needed)
        granted = self.pool.take_credit(num_bytes, is_awaited)
        assert granted == (needed + num_bytes <= limit)
        if granted:
            self.credits.append(num_bytes)

    @precondition(lambda self: self.credits)
    @rule()
    def hold(self) -> None:
        self.needed.append(self.pool.hold(bytes(self.credits.pop())))

    @precondition(lambda self: self.credits)
    @rule()
    def return_credit(self) -> None:
        self.pool.return_credit(self.credits.pop())

    @precondition(lambda self: self.needed)
    @rule(data=st.data())
    def mark_sent(self, data: st.DataObject) -> None:
        chunk = self.needed.pop(data.draw(st.integers(0, len(self.needed) - 1)))
        self.pool.mark_sent(chunk)
        self.sent.append(chunk)

    @precondition(lambda self: self.needed or self.sent)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        owners = [chunks for chunks in (self.needed, self.sent) if chunks]
        chunks = data.draw(st.sampled_from(owners))
        chunk = chunks.pop()
        self.pool.drop(chunk)
        self.pool.drop(chunk)

    @invariant()
    def counts_are_right(self) -> None:
        held = [chunk for chunk in self.needed + self.sent if chunk.message is not None]
        assert self.pool.used == sum(self.credits) + sum(chunk.num_bytes for chunk in held)
        assert self.pool.used <= CAPACITY
        assert all(chunk.message is not None for chunk in self.needed)

    def teardown(self) -> None:
        for num_bytes in self.credits:
            self.pool.return_credit(num_bytes)
        for chunk in self.needed + self.sent:
            self.pool.drop(chunk)
        assert self.pool.used == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_the_longest_sent_goes_first() -> None:
    pool = StagingPool(30)
    chunks = []
    for _ in range(3):
        assert pool.take_credit(10, is_awaited=False)
        chunks.append(pool.hold(bytes(10)))
    assert not pool.take_credit(10, is_awaited=True)
    pool.mark_sent(chunks[1])
    pool.mark_sent(chunks[0])
    assert pool.take_credit(10, is_awaited=True)
    assert [chunk.message is None for chunk in chunks] == [False, True, False]
    assert pool.num_displaced == 1


def test_what_can_never_fit_says_so() -> None:
    pool = StagingPool(100, 50)
    assert not pool.take_credit(60, is_awaited=False)
    assert pool.take_credit(60, is_awaited=True)
    with pytest.raises(StagingFull, match="staging_bytes"):
        pool.take_credit(101, is_awaited=True)
    with pytest.raises(ValueError, match="credit"):
        pool.return_credit(61)
