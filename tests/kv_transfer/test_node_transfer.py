"""Answers of all processes merged into one outcome, whatever their order."""

from __future__ import annotations

import itertools

import pytest

from kv_transfer.control.node_transfer import NodeTransfer, Outcome
from kv_transfer.metadata import (
    KVTransferParams,
    TransferEvent,
    TransferEventKind,
    TransferStats,
)

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
PARAMS = KVTransferParams(transfer_id="0" * 32)


def event(kind: TransferEventKind, process: int, **more: object) -> TransferEvent:
    return TransferEvent(kind, PARAMS.transfer_id, 0, process, **more)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_received_when_the_last_process_has_its_share(order: tuple[int, ...]) -> None:
    transfer = NodeTransfer(PARAMS, 3, is_producer=False)
    for process in order:
        assert transfer.outcome is None
        transfer.apply(event(FIRST_BYTE, process))
        stats = TransferStats(10 * (process + 1), 2, 5.0 + process, 9.0 - process)
        transfer.apply(event(RECEIVED, process, stats=stats))
    assert transfer.outcome is Outcome.DONE
    assert transfer.stats == TransferStats(60, 6, 5.0, 9.0)
    assert not transfer.take_staged()


@pytest.mark.parametrize("order", list(itertools.permutations([(0, 0), (0, 1), (1, 0), (1, 1)])))
def test_staged_once_and_released_when_all_are(order: tuple[tuple[int, int], ...]) -> None:
    transfer = NodeTransfer(PARAMS, 2, is_producer=True)
    staged, num_reported = {0: 0, 1: 0}, 0
    for process, _ in order:
        kind = STAGED if staged[process] == 0 else RELEASED
        staged[process] += 1
        transfer.apply(event(kind, process))
        num_reported += transfer.take_staged()
        assert num_reported == (min(staged.values()) >= 1)
    assert transfer.outcome is Outcome.DONE


@pytest.mark.parametrize("bad", [FAILED, ABORTED])
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_waits_for_the_others(bad: TransferEventKind, first: bool) -> None:
    transfer = NodeTransfer(PARAMS, 2, is_producer=True)
    events = [event(bad, 0, reason="why", retryable=False), event(STAGED, 1)]
    for one in events if first else reversed(events):
        transfer.apply(one)
    assert transfer.outcome is None
    assert not transfer.take_staged()
    transfer.apply(event(ABORTED, 1, reason="called off"))
    assert transfer.outcome is (Outcome.FAILED if bad is FAILED else Outcome.ABORTED)
    assert transfer.failure == ("why", False)


def test_a_failure_counts_though_the_peer_gave_up_before() -> None:
    transfer = NodeTransfer(PARAMS, 2, is_producer=True)
    transfer.apply(event(ABORTED, 0, reason="the puller gave up"))
    transfer.apply(event(FAILED, 1, reason="the process was lost"))
    assert transfer.outcome is Outcome.FAILED


def test_an_abort_that_was_asked_for_is_reported_as_one_even_if_all_had_arrived() -> None:
    transfer = NodeTransfer(PARAMS, 2, is_producer=False)
    transfer.apply(event(RECEIVED, 0))
    transfer.abort_requested = True
    transfer.apply(event(RECEIVED, 1))
    assert transfer.outcome is Outcome.ABORTED


def test_a_process_answers_once() -> None:
    transfer = NodeTransfer(PARAMS, 2, is_producer=False)
    for kind in (RECEIVED, FAILED, RECEIVED):
        transfer.apply(event(kind, 0, stats=TransferStats(num_bytes=5)))
    assert transfer.outcome is None and transfer.failure is None
    assert transfer.stats.num_bytes == 5
