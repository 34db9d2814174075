"""The table of transfers, stepped by hand and at random."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.state import KVTransferState, LateMessage, TransferTable

PENDING, ACTIVE, DONE, FAILED, ABORTED = KVTransferState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_life_by_hand() -> None:
    clock = Clock()
    table: TransferTable[str] = TransferTable(tombstone_s=60, clock=clock)
    table.open("a", 1, "first")
    assert table.state("a", 1) is PENDING
    assert table.find("a", 1) == "first" and table.find("a", 0) is None
    with pytest.raises(ValueError, match="PENDING to DONE"):
        table.end("a", 1, DONE)
    assert not table.activate("a", 2)
    assert table.activate("a", 1) and table.activate("a", 1)
    with pytest.raises(ValueError, match="not an end"):
        table.end("a", 1, PENDING)
    with pytest.raises(LateMessage, match="in motion"):
        table.open("a", 2, "too early")
    assert table.end("a", 0, FAILED) is None
    assert table.end("a", 1, DONE) == "first"
    assert table.end("a", 1, ABORTED) is None
    assert table.state("a", 1) is DONE
    assert not table.activate("a", 1)
    with pytest.raises(LateMessage, match="has ended"):
        table.open("a", 1, "late")
    with pytest.raises(LateMessage, match="has ended"):
        table.open("a", 0, "later")
    assert table.is_late("a", 0) and table.is_late("a", 1) and not table.is_late("a", 2)
    table.open("a", 2, "second")
    assert list(table) == ["second"] and len(table) == 1
    assert table.end("a", 2, ABORTED) == "second"
    assert len(table) == 0


def test_an_attempt_is_refused_beside_an_older_one_that_lives() -> None:
    """The puller of attempt 1 was done before the prefill node heard of it."""
    table: TransferTable[str] = TransferTable(tombstone_s=60, clock=Clock())
    table.open("a", 0, "first")
    table.refuse("a", 1, DONE)
    assert table.find("a", 0) == "first" and not table.is_late("a", 0)
    assert table.is_late("a", 1) and table.state("a", 1) is DONE and not table.is_late("a", 2)
    assert table.activate("a", 0) and table.end("a", 0, ABORTED) == "first"
    assert table.state("a", 1) is DONE and table.is_late("a", 0)
    with pytest.raises(LateMessage, match="attempt 1 has ended .DONE"):
        table.open("a", 1, "second")


def test_a_refused_attempt_cannot_open_until_it_is_forgotten() -> None:
    clock = Clock()
    table: TransferTable[str] = TransferTable(tombstone_s=60, clock=clock)
    table.refuse("a", 3)
    with pytest.raises(LateMessage):
        table.open("a", 3, "late")
    clock.now += 61
    assert not table.is_late("a", 3)
    table.open("a", 3, "as if new")
    table.refuse("a", 3)
    assert table.find("a", 3) == "as if new"


@pytest.mark.parametrize(
    ("state", "end"),
    list(itertools.product([PENDING, ACTIVE], [DONE, FAILED, ABORTED])),
    ids=str,
)
def test_ends(state: KVTransferState, end: KVTransferState) -> None:
    table: TransferTable[int] = TransferTable()
    table.open("a", 0, 5)
    if state is ACTIVE:
        table.activate("a", 0)
    if (state, end) == (PENDING, DONE):
        with pytest.raises(ValueError, match="PENDING to DONE"):
            table.end("a", 0, end)
    else:
        assert table.end("a", 0, end) == 5
        assert table.state("a", 0) is end and end.has_ended and not state.has_ended


class TableMachine(RuleBasedStateMachine):
    """Messages of any attempt in any order: an attempt lives at most once, and only the newest."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table: TransferTable[tuple[str, int]] = TransferTable(60, self.clock)
        self.live: dict[str, int] = {}
        self.ended: dict[str, int] = {}

    ids = st.sampled_from(["a", "b"])
    attempts = st.integers(0, 4)

    @rule(name=ids, attempt=attempts)
    def open(self, name: str, attempt: int) -> None:
        allowed = name not in self.live and attempt > self.ended.get(name, -1)
        try:
            self.table.open(name, attempt, (name, attempt))
        except LateMessage:
            assert not allowed
        else:
            assert allowed
            self.live[name] = attempt

    @rule(name=ids, attempt=attempts)
    def activate(self, name: str, attempt: int) -> None:
        assert self.table.activate(name, attempt) == (self.live.get(name) == attempt)

    @rule(name=ids, attempt=attempts, end=st.sampled_from([FAILED, ABORTED]))
    def end(self, name: str, attempt: int, end: KVTransferState) -> None:
        ended = self.table.end(name, attempt, end)
        if self.live.get(name) == attempt:
            assert ended == (name, attempt)
            del self.live[name]
            self.ended[name] = attempt
        else:
            assert ended is None

    @rule(name=ids, attempt=attempts)
    def refuse(self, name: str, attempt: int) -> None:
        self.table.refuse(name, attempt)
        if name not in self.live and attempt > self.ended.get(name, -1):
            self.ended[name] = attempt

    @rule()
    def a_minute_passes(self) -> None:
        self.clock.now += 61
        self.ended.clear()

    @invariant()
    def only_the_newest_lives(self) -> None:
        assert sorted(self.table) == sorted(self.live.items())
        for name in ("a", "b"):
            for attempt in range(5):
                found = self.table.find(name, attempt)
                assert (found is not None) == (self.live.get(name) == attempt)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=30)
