"""One transfer as a whole node sees it: what all of its transfer processes say, merged.

every process answers with exactly one of RELEASED, RECEIVED, FAILED, ABORTED
outcome    none until all have answered; then ABORTED if that was asked for here,
           FAILED if one failed, ABORTED if the peer gave up, else DONE
is_staged  (producer) every process has copied its share out of the blocks
"""

from __future__ import annotations

import sys
from enum import Enum

from kv_transfer.errors import KV_TRANSFER
from kv_transfer.layer_times import later
from kv_transfer.layout import BlockIds
from kv_transfer.metadata import (
    KVTransferParams,
    TransferEvent,
    TransferEventKind,
    TransferStats,
)


class Outcome(Enum):
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_ENDS = {
    TransferEventKind.RELEASED,
    TransferEventKind.RECEIVED,
    TransferEventKind.FAILED,
    TransferEventKind.ABORTED,
}


class NodeTransfer:
    """One transfer, seen over all processes of this node.

    `unended`: those that have not answered yet.
    """

    def __init__(self, params: KVTransferParams, num_processes: int, is_producer: bool) -> None:
        self.params = params
        self.is_export = is_producer
        """Its KV goes out."""
        self.unended = set(range(num_processes))
        self.failure: tuple[str, bool] | None = None
        """Why there is nothing to wait for any more, and whether another attempt may succeed."""
        self.failure_code = KV_TRANSFER
        self.abort_requested = False
        self.stats = TransferStats()
        self.num_announced = 0
        """Producer: leading tokens that transfer processes know to be computed or scheduled."""
        self.block_ids: BlockIds = ()
        """Producer: the prompt's blocks so far."""
        self._unstaged = set(range(num_processes)) if is_producer else set()
        self._staged_is_news = is_producer
        self._has_failed = False
        self.num_tokens_kept = sys.maxsize
        """Consumer, at the end: the least that any process has of the prompt's beginning."""

    @property
    def is_staged(self) -> bool:
        return not self._unstaged

    def apply(self, event: TransferEvent) -> None:
        """Events of processes that have answered already change nothing."""
        if event.process not in self.unended:
            return
        if event.kind is TransferEventKind.STAGED:
            self._unstaged.discard(event.process)
        elif event.kind in _ENDS:
            self._end(event)

    def take_staged(self) -> bool:
        """Returns True once, when the last process has staged its share and nothing has gone
        wrong."""
        if self._unstaged or not self._staged_is_news or self.failure or self.abort_requested:
            return False
        self._staged_is_news = False
        return True

    @property
    def outcome(self) -> Outcome | None:
        if self.unended:
            return None
        if self.abort_requested:
            return Outcome.ABORTED
        if self._has_failed:
            return Outcome.FAILED
        return Outcome.ABORTED if self.failure is not None else Outcome.DONE

    def _end(self, event: TransferEvent) -> None:
        self.unended.discard(event.process)
        self._unstaged.discard(event.process)
        self.stats = _merge(self.stats, event.stats)
        self.num_tokens_kept = min(self.num_tokens_kept, event.num_tokens_kept)
        self._has_failed |= event.kind is TransferEventKind.FAILED
        went_wrong = event.kind in (TransferEventKind.FAILED, TransferEventKind.ABORTED)
        if went_wrong and self.failure is None:
            self.failure = (event.reason or "a transfer process called it off", event.retryable)
            self.failure_code = event.code


def _merge(a: TransferStats, b: TransferStats) -> TransferStats:
    """Bytes, streams and rates add up; the earliest first and the latest last byte count."""
    firsts = [at for at in (a.first_byte_at, b.first_byte_at) if at > 0]
    return TransferStats(
        num_bytes=a.num_bytes + b.num_bytes,
        num_streams=a.num_streams + b.num_streams,
        first_byte_at=min(firsts, default=0.0),
        last_byte_at=max(a.last_byte_at, b.last_byte_at),
        received_at=max(a.received_at, b.received_at),
        layers=later(a.layers, b.layers),
        path_bytes_per_s=a.path_bytes_per_s + b.path_bytes_per_s,
        path_was_full=a.path_was_full or b.path_was_full,
    )
