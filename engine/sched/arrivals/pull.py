"""The pull of one request's KV (decode node), until the request enters a row.

                      ┌──────▶ RECLAIMED ── retry ──▶ QUEUED
QUEUED ──▶ RECEIVING ─┴▶ RECEIVED ──(first token)──▶ READY ──▶ a row
             │  │ └──▶ FAILED ──── retry ──▶ QUEUED    ▲
             │  └────▶ PARTIAL ─┬─ retry ──▶ RECEIVING │
             │          ▲       └─ computed here ──────┘
             └──▶ RETRYING, STOPPING ──▶ PARTIAL, FAILED

QUEUED      in the waiting queue; nothing was asked for anything
RECEIVING   all blocks that the request needs until it runs are allocated, and transfer
            processes write them
RETRYING    called off for another attempt, which begins when no writer is left
STOPPING    called off to be computed here, which does not wait long for the writers
RECEIVED    complete; the first token may come long after
PARTIAL     ended early, but the request keeps its blocks: they hold KV that is complete for
            `request.num_computed_tokens`, and whatever comes next goes on behind it
FAILED      ended early, and nothing of it is kept; the node server decides what follows
RECLAIMED   running requests needed the blocks; the prompt is computed here once the first
            token is known
READY       the request has blocks and KV, and lacks only a row
ENDED       from anywhere: in a row, aborted, or an ordinary request again; with choices, shared
            by them as soon as READY would be
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from engine.contracts.request import Request
from kv_transfer.metadata import KVTransferParams


class PullState(IntEnum):
    QUEUED = 0
    RECEIVING = 1
    RETRYING = 2
    STOPPING = 3
    RECEIVED = 4
    PARTIAL = 5
    FAILED = 6
    RECLAIMED = 7
    READY = 8
    ENDED = 9


_S = PullState
NEXT_STATES = {
    _S.QUEUED: {_S.RECEIVING, _S.ENDED},
    _S.RECEIVING: {_S.RETRYING, _S.STOPPING, _S.RECEIVED, _S.PARTIAL, _S.FAILED, _S.ENDED},
    _S.RETRYING: {_S.STOPPING, _S.PARTIAL, _S.FAILED, _S.ENDED},
    _S.STOPPING: {_S.RETRYING, _S.PARTIAL, _S.FAILED, _S.ENDED},
    _S.RECEIVED: {_S.READY, _S.RECLAIMED, _S.ENDED},
    _S.PARTIAL: {_S.RECEIVING, _S.READY, _S.FAILED, _S.ENDED},
    _S.FAILED: {_S.QUEUED, _S.ENDED},
    _S.RECLAIMED: {_S.QUEUED, _S.ENDED},
    _S.READY: {_S.ENDED},
    _S.ENDED: set[PullState](),
}
BEING_CALLED_OFF = (_S.RETRYING, _S.STOPPING)
"""Writers were asked to stop, and have not said that they did."""
IN_MOTION = (_S.RECEIVING, *BEING_CALLED_OFF)
"""Transfer processes may write into the blocks."""
IDLE_WITH_BLOCKS = (_S.RECEIVED, _S.PARTIAL, _S.READY)
"""Nothing writes into the blocks any more, and no row has them yet."""


@dataclass(slots=True, eq=False)
class Pull:
    """The state of one pull, as `Pulls` knows it; only `Pulls` changes it.

    Attributes:
        transfer_id: The same for all attempts.
        num_external_tokens: They come from the peer, after those that were here.
        is_computed: The peer of the latest attempt has computed the whole prompt.
        is_retry: The connector has learnt of an earlier attempt.
        next_params: The attempt to begin; None unless RETRYING.
        stop_by: While STOPPING: CLOCK_MONOTONIC seconds after which nothing waits for writers.
    """

    request: Request
    transfer_id: str
    state: PullState = PullState.QUEUED
    num_external_tokens: int = 0
    is_computed: bool = False
    is_retry: bool = False
    next_params: KVTransferParams | None = None
    stop_by: float = 0.0

    @property
    def params(self) -> KVTransferParams:
        """Returns the parameters of the latest attempt that was begun or queued."""
        params = self.request.kv_transfer_params
        assert params is not None
        return params
