"""The pull of one request's KV (decode node), until the request enters a row.

QUEUED ──▶ RECEIVING ──▶ RECEIVED ──(first token known)──▶ ready for a row
  ▲         │   │         └──────▶ RECLAIMED
  │  retry, │   └──▶ FAILED ─┐
  │  local  ▼                │
  ├────── STOPPING           │
  └──────────────────────────┘ retry

1. QUEUED      in the waiting queue; nobody was asked for anything
2. RECEIVING   all blocks that the request needs until it runs are allocated, and transfer
               processes write them
3. STOPPING    called off, for another attempt or to be computed here, which begins when no
               writer is left; computing here does not wait long for that
4. RECEIVED    complete; the first token may come before, or long after
5. FAILED      reported; the node server decides: retry, prefill here, or abort. Tokens from the
               prompt's beginning whose KV is complete are kept for whatever comes next
6. RECLAIMED   running requests needed the blocks; the prompt is computed here once the first
               token is known
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from engine.request import Request
from kv_transfer.metadata import KVTransferParams


class PullPhase(IntEnum):
    QUEUED = 0
    RECEIVING = 1
    STOPPING = 2
    RECEIVED = 3
    FAILED = 4
    RECLAIMED = 5


@dataclass(slots=True, eq=False)
class Pull:
    """`num_external_tokens` come from the peer, after those that were here. `keeps_part`: FAILED,
    and the request still has blocks, with KV of `request.num_computed_tokens`."""

    request: Request
    phase: PullPhase = PullPhase.QUEUED
    num_external_tokens: int = 0
    is_retry: bool = False
    keeps_part: bool = False
    next_params: KVTransferParams | None = None
    """While STOPPING: the attempt to begin; None: none, the prompt is computed here."""
    stop_by: float = 0.0
    """While STOPPING to be computed here: CLOCK_MONOTONIC seconds."""

    @property
    def params(self) -> KVTransferParams:
        params = self.request.kv_transfer_params
        assert params is not None
        return params
