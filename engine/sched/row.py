"""One request's stay in a row of the workers' tables.

Life of a row:

    PREFILL ──▶ JOINING ──▶ DECODE ──▶ DRAINING ──▶ GONE
                   ▲           │                     ▲
                   └───────────┘                     │
                  no block free          finished, aborted or preempted, from anywhere

    PREFILL   known tokens are computed, chunk by chunk
    JOINING   all known tokens are scheduled; needs one token's room to enter the decode set
    DECODE    every step computes one token, without being told again
    DRAINING  its last step is scheduled; only the result is missing
    GONE      the request left; steps in flight may still carry it, their results are dropped
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from engine.kv_cache.block import KVCacheBlock
from engine.request import Request
from engine.sched.request_queue import SortKey


class RowPhase(IntEnum):
    PREFILL = 0
    JOINING = 1
    DECODE = 2
    DRAINING = 3
    GONE = 4


class Row:
    """What the scheduler keeps while a request is in a row. `epoch` tells owners apart."""

    __slots__ = (
        "blocks",
        "check_len",
        "decode_base",
        "epoch",
        "event_step",
        "index",
        "is_offer",
        "key",
        "max_len",
        "num_scheduled",
        "phase",
        "prefill_len",
        "request",
        "request_id",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        index: int,
        epoch: int,
        request: Request,
        blocks: list[KVCacheBlock],
        key: SortKey,
        max_len: int,
    ) -> None:
        sampling = request.sampling
        self.index = index
        self.epoch = epoch
        self.request = request
        self.request_id = request.request_id
        self.tokens = request.all_token_ids
        self.blocks = blocks
        """The request's block table, which grows in place."""
        self.key = key
        self.max_len = max_len
        """Tokens, prompt included, at which the output ends."""
        self.prefill_len = request.num_tokens
        self.num_scheduled = request.num_computed_tokens
        """Leading tokens that scheduled steps have computed or will; stale in DECODE."""
        self.decode_base = 0
        """In DECODE: after step s is scheduled, `decode_base + s` tokens are."""
        self.event_step = 0
        """In DECODE: the step before which something must be decided for this row."""
        self.phase = RowPhase.PREFILL
        self.is_offer = False
        """A peer pulls this request's KV, so its blocks may not change: never preempted."""
        eos = () if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset((*eos, *sampling.stop_token_ids))
        """Tokens that may end the output (not before `min_tokens`)."""
        self.check_len = max_len
        """Confirmed tokens at which a full block can be published or the output ends."""

    @property
    def is_gone(self) -> bool:
        return self.phase is RowPhase.GONE

    @property
    def remaining_prefill(self) -> int:
        return self.prefill_len - self.num_scheduled


class RowTable:
    """Gives rows out, each time with a new epoch."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[Row | None] = [None] * num_rows  # [row index]
        self._epochs = [0] * num_rows  # [row index], of the latest owner
        self._free = list(reversed(range(num_rows)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_live(self) -> int:
        return len(self.rows) - len(self._free)

    def live(self) -> Iterator[Row]:
        return (row for row in self.rows if row is not None)

    def assign(
        self, request: Request, blocks: list[KVCacheBlock], key: SortKey, max_len: int
    ) -> Row:
        """Raises `IndexError` when no row is free."""
        index = self._free.pop()
        self._epochs[index] += 1
        row = Row(index, self._epochs[index], request, blocks, key, max_len)
        self.rows[index] = row
        request.row, request.epoch = row.index, row.epoch
        return row

    def release(self, row: Row) -> None:
        row.phase = RowPhase.GONE
        row.request.row = -1
        self.rows[row.index] = None
        self._free.append(row.index)

    def of(self, request: Request) -> Row:
        """The row of a running request."""
        row = self.rows[request.row]
        assert row is not None
        return row
