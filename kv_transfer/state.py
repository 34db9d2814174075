"""Life of a transfer, and the one table where it changes.

    PENDING ──▶ ACTIVE ──▶ DONE
       │          ├──────▶ FAILED
       └──────────┴──────▶ ABORTED      (PENDING may fail or be aborted too, but not be done)

A transfer is named by (transfer id, attempt). What a table knows of one transfer id:

    1. `open`: this attempt is the newest; an older one must have ended before
    2. `activate`, then `end`: both refuse anything but the attempt that lives
    3. a tombstone stays for a while: a message of an ended or older attempt finds no transfer,
       and cannot open one again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from kv_transfer.errors import KVTransferError

TOMBSTONE_S = 60.0


class KVTransferState(IntEnum):
    """Ordered: everything from DONE on has ended."""

    PENDING = 0
    ACTIVE = 1
    DONE = 2
    FAILED = 3
    ABORTED = 4

    @property
    def has_ended(self) -> bool:
        return self >= KVTransferState.DONE


_NEXT = {
    KVTransferState.PENDING: {
        KVTransferState.ACTIVE,
        KVTransferState.FAILED,
        KVTransferState.ABORTED,
    },
    KVTransferState.ACTIVE: {
        KVTransferState.DONE,
        KVTransferState.FAILED,
        KVTransferState.ABORTED,
    },
}


class LateMessage(KVTransferError):
    """Raised for a message of an attempt that has ended or been replaced."""

    retryable = False


T = TypeVar("T")


@dataclass(slots=True)
class _Live(Generic[T]):
    attempt: int
    state: KVTransferState
    transfer: T


@dataclass(slots=True)
class _Tombstone:
    attempt: int
    state: KVTransferState
    ended_at: float


class TransferTable(Generic[T]):
    """Transfers of one process by id. `T` is what the owner keeps for each."""

    def __init__(
        self, tombstone_s: float = TOMBSTONE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tombstone_s = tombstone_s
        self._clock = clock
        self._live: dict[str, _Live[T]] = {}
        self._tombstones: dict[str, _Tombstone] = {}
        """Oldest first."""

    def open(self, transfer_id: str, attempt: int, transfer: T) -> None:
        """Raises `LateMessage` unless `attempt` is newer than all that is known."""
        self._drop_expired_tombstones()
        live = self._live.get(transfer_id)
        if live is not None:
            raise LateMessage(
                f"transfer {transfer_id} attempt {attempt}: attempt {live.attempt} is in motion"
            )
        tombstone = self._tombstones.get(transfer_id)
        if tombstone is not None and attempt <= tombstone.attempt:
            raise LateMessage(
                f"transfer {transfer_id} attempt {attempt}: attempt {tombstone.attempt} "
                f"has ended ({tombstone.state.name})"
            )
        self._live[transfer_id] = _Live(attempt, KVTransferState.PENDING, transfer)

    def find(self, transfer_id: str, attempt: int) -> T | None:
        """Returns the transfer, if this very attempt lives."""
        live = self._live.get(transfer_id)
        return live.transfer if live is not None and live.attempt == attempt else None

    def live_attempt(self, transfer_id: str) -> int | None:
        live = self._live.get(transfer_id)
        return live.attempt if live is not None else None

    def state(self, transfer_id: str, attempt: int) -> KVTransferState | None:
        """Returns None for what was never known, or is long forgotten."""
        live = self._live.get(transfer_id)
        if live is not None and live.attempt == attempt:
            return live.state
        self._drop_expired_tombstones()
        tombstone = self._tombstones.get(transfer_id)
        if tombstone is not None and attempt == tombstone.attempt:
            return tombstone.state
        return None

    def is_late(self, transfer_id: str, attempt: int) -> bool:
        """Returns whether this attempt can never live (again), as far as is known."""
        live = self._live.get(transfer_id)
        if live is not None and attempt <= live.attempt:
            return attempt < live.attempt
        self._drop_expired_tombstones()
        tombstone = self._tombstones.get(transfer_id)
        return tombstone is not None and attempt <= tombstone.attempt

    def activate(self, transfer_id: str, attempt: int) -> bool:
        """Returns False when this attempt does not live. An active transfer stays active."""
        live = self._live.get(transfer_id)
        if live is None or live.attempt != attempt:
            return False
        if live.state != KVTransferState.ACTIVE:
            self._move(live, KVTransferState.ACTIVE)
        return True

    def end(self, transfer_id: str, attempt: int, state: KVTransferState) -> T | None:
        """Returns the transfer that ended, or None when this attempt does not live.

        Raises ValueError for a change that the drawing above lacks.
        """
        live = self._live.get(transfer_id)
        if live is None or live.attempt != attempt:
            return None
        if not state.has_ended:
            raise ValueError(f"{state.name} is not an end")
        self._move(live, state)
        del self._live[transfer_id]
        self._entomb(transfer_id, attempt, state)
        return live.transfer

    def refuse(
        self,
        transfer_id: str,
        attempt: int,
        state: KVTransferState = KVTransferState.ABORTED,
    ) -> None:
        """This attempt may never open: it ended before it was known here. An older one that lives
        goes on."""
        if self.find(transfer_id, attempt) is None and not self.is_late(transfer_id, attempt):
            self._entomb(transfer_id, attempt, state)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[T]:
        """Yields the living. The table may change meanwhile."""
        return iter([live.transfer for live in self._live.values()])

    @staticmethod
    def _move(live: _Live[T], state: KVTransferState) -> None:
        if state not in _NEXT[live.state]:
            raise ValueError(f"a transfer cannot go from {live.state.name} to {state.name}")
        live.state = state

    def _entomb(self, transfer_id: str, attempt: int, state: KVTransferState) -> None:
        newer = self._tombstones.pop(transfer_id, None)
        if newer is not None and newer.attempt > attempt:
            attempt, state = newer.attempt, newer.state
        self._tombstones[transfer_id] = _Tombstone(attempt, state, self._clock())

    def _drop_expired_tombstones(self) -> None:
        horizon = self._clock() - self._tombstone_s
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest].ended_at > horizon:
                return
            del self._tombstones[oldest]
