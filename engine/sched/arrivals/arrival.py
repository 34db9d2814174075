"""KV on its way to one request, until the request enters a row: its states, whatever the source.

                                ┌───────▶ RECLAIMED ── retry ──▶ QUEUED
QUEUED ──▶ ASKED ──▶ COMING ────┴─▶ HERE ──(first token)──▶ READY ──▶ a row
  └──────────┼─────────▶┘│  │ └──▶ NOTHING ──── retry ──▶ QUEUED ▲
             │           │  └────▶ PART ─┬─ retry ──▶ COMING     │
             │           │           ▲   └─ computed here ───────┤
             │           │           └── RETRYING, STOPPING ──▶ NOTHING
             │           └──▶ EARLY ──▶ an ordinary row          │
             └──── no, or computing is quicker ──────────────────┘

QUEUED      in the waiting queue; no source was asked for anything
ASKED       has all blocks that the request needs; the source is asked what it holds
COMING      all blocks are allocated, and the source's writers write into them
EARLY       in a row already: its step waits for each layer, which are still coming
RETRYING    called off for another attempt, which begins when no writer is left
STOPPING    called off to be computed here, which does not wait long for the writers
HERE        complete; the first token may come long after
PART        ended early, but the request keeps its blocks: they hold KV that is complete for
            `request.num_computed_tokens`, and whatever comes next goes on behind it
NOTHING     ended early, and nothing of it is kept
RECLAIMED   running requests needed the blocks; the prompt is computed here once the first
            token is known
READY       the request has blocks and KV, and lacks only a row
ENDED       from anywhere: in a row, aborted, or an ordinary request again

Which of them a source uses:

    prefill node   QUEUED COMING RETRYING STOPPING HERE PART NOTHING RECLAIMED READY
    host, disk     QUEUED COMING EARLY HERE NOTHING READY
    a peer         QUEUED ASKED COMING HERE PART NOTHING READY
    a store        QUEUED ASKED COMING HERE NOTHING READY

This node's own cache needs none: what it has is taken with the allocation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from engine.contracts.messages import KVTransferResult
from engine.contracts.request import Request
from kv_transfer.metadata import TransferName, TransferStats


class ArrivalState(IntEnum):
    QUEUED = 0
    ASKED = 1
    COMING = 2
    EARLY = 3
    RETRYING = 4
    STOPPING = 5
    HERE = 6
    PART = 7
    NOTHING = 8
    RECLAIMED = 9
    READY = 10
    ENDED = 11


_S = ArrivalState
NEXT_STATES = {
    _S.QUEUED: {_S.ASKED, _S.COMING, _S.ENDED},
    _S.ASKED: {_S.COMING, _S.READY, _S.ENDED},
    _S.COMING: {
        _S.EARLY, _S.RETRYING, _S.STOPPING, _S.HERE, _S.PART, _S.NOTHING, _S.ENDED,
    },
    _S.EARLY: {_S.ENDED},
    _S.RETRYING: {_S.STOPPING, _S.PART, _S.NOTHING, _S.ENDED},
    _S.STOPPING: {_S.RETRYING, _S.PART, _S.NOTHING, _S.ENDED},
    _S.HERE: {_S.READY, _S.RECLAIMED, _S.ENDED},
    _S.PART: {_S.COMING, _S.READY, _S.NOTHING, _S.ENDED},
    _S.NOTHING: {_S.QUEUED, _S.ENDED},
    _S.RECLAIMED: {_S.QUEUED, _S.ENDED},
    _S.READY: {_S.ENDED},
    _S.ENDED: set[ArrivalState](),
}  # fmt: skip
BEING_CALLED_OFF = (_S.RETRYING, _S.STOPPING)
"""Writers were asked to stop, and have not reported that they did."""
IN_MOTION = (_S.COMING, *BEING_CALLED_OFF)
"""The source's writers may write into the blocks."""
IDLE_WITH_BLOCKS = (_S.HERE, _S.PART, _S.READY)
"""No writer is left, and no row has the blocks yet."""
WITH_BLOCKS = (_S.ASKED, *IN_MOTION, *IDLE_WITH_BLOCKS)
"""The request has blocks and no row."""

WriterKey = TransferName | int
"""Names who writes into blocks, or reads them: an attempt of a transfer, or a job of the host
tier."""


@dataclass(slots=True, eq=False)
class KVArrival:
    """KV from one source; only `Arrivals` changes `state`. Sources add what they keep of it.

    Attributes:
        num_before: Leading tokens whose KV was here when the source began.
        num_coming: Tokens that come from the source, behind those.
        goes_on: Another source has brought the KV of those before.
        asked_at: When the source was asked what it holds; 0: it is not asked.
    """

    request: Request
    source: KVSource[Any]
    num_before: int = 0
    num_coming: int = 0
    goes_on: bool = False
    asked_at: float = 0.0
    state: ArrivalState = ArrivalState.QUEUED


@dataclass(slots=True, eq=False)
class TransferArrival(KVArrival):
    """KV that a transfer of the connector brings. `transfer` names the latest attempt that has
    begun; None: there is none yet."""

    source: TransferSource[Any]
    transfer: TransferName | None = None


A_contra = TypeVar("A_contra", bound=KVArrival, contravariant=True)


class KVSource(Protocol[A_contra]):
    """A place from which KV comes to waiting requests. It moves its arrivals through `Arrivals`.

    1. `find`    how many tokens may come from there?
    2. `begin`   blocks for the request's whole need are allocated; ask for KV
    3. `check`   before each step: give up on what takes too long
    4. `stop`    before it is here: the request ended, or goes on without the source
    """

    finds_certainly: bool
    """All that `find` has found comes, or nothing does."""
    writes_by_token: bool
    """All behind the computed tokens is written, whatever of it the cache has in some groups."""

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """Returns the number of tokens behind the first `num_computed_tokens` that may come from
        here; 0: none, or computing them is quicker."""

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        """Asks for `num_tokens` tokens behind the computed ones, whose KV the blocks have."""

    def check(self) -> None:
        """Goes on without KV that has been waited for too long, before each step."""

    def stop(self, arrival: A_contra) -> WriterKey | None:
        """Calls off whatever is on its way. Returns who may still write into the blocks: they stay
        held by that key until its end is reported. None: no writer is left."""


class TransferSource(KVSource[A_contra], Protocol[A_contra]):
    """One whose KV a transfer of the connector brings. Others learn of the end by themselves."""

    def received(self, arrival: A_contra, stats: TransferStats) -> KVTransferResult | None:
        """All of it is here. Returns a result for the node server; None: it
        needs none."""

    def failed(
        self, arrival: A_contra, num_tokens_kept: int, failure: KVTransferResult
    ) -> KVTransferResult | None:
        """Goes on after a transfer that has failed or was aborted: no writer is left.
        `num_tokens_kept`: from the prompt's beginning, with KV that is complete. `failure` says
        why, and is returned if the node server is to decide what follows."""
