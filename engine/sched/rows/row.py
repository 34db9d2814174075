"""One request's stay in a row of the workers' tables.

Life of a row:

    PREFILL ──▶ JOINING ──▶ DECODE ──▶ DRAINING ──▶ GONE
                   ▲           │                     ▲
                   └───────────┘                     │
           no block free, or held        finished, aborted or preempted, from anywhere

    PREFILL   known tokens are computed, chunk by chunk
    JOINING   all known tokens are scheduled; needs a step's room to enter the decode set
    DECODE    every step computes up to `decode_query_len` tokens, without another message
    DRAINING  its last step is scheduled; only the result is missing
    GONE      the request left; steps in flight may still carry it, their results are dropped

The worker knows how many tokens the row has. The scheduler knows bounds:

    confirmed  <=  certain  <=  what workers have  <=  reserved

    confirmed  tokens that results have named
    certain    and one more for each step that is out
    reserved   and all that those steps may give; blocks are there for this many
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from engine.contracts.request import Request
from engine.kv_cache.group_manager import RequestBlocks
from engine.sched.request_queue import SortKey


class RowPhase(IntEnum):
    PREFILL = 0
    JOINING = 1
    DECODE = 2
    DRAINING = 3
    GONE = 4


class Row:
    """The scheduler's view of a request in a row. `epoch` tells owners apart."""

    __slots__ = (
        "blocks",
        "check_len",
        "epoch",
        "event_step",
        "index",
        "is_exported",
        "is_idle",
        "is_seated",
        "keep_at",
        "key",
        "max_len",
        "num_reserved",
        "phase",
        "prefill_len",
        "request",
        "request_id",
        "reserved_base",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        index: int,
        epoch: int,
        request: Request,
        blocks: RequestBlocks,
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
        """The request's, which grow in place."""
        self.key = key
        self.max_len = max_len
        """Tokens, prompt included, at which the output ends."""
        self.prefill_len = request.num_tokens
        self.num_reserved = request.num_computed_tokens
        """Leading tokens whose KV scheduled steps write at most; stale in DECODE."""
        self.reserved_base = 0
        """The same for a row in DECODE, less what the row may compute in all steps since step 0."""
        self.event_step = 0
        """The step before which something must be decided for this row, in DECODE."""
        self.phase = RowPhase.PREFILL
        self.is_idle = request.is_idle_class
        self.is_exported = False
        """A peer pulls this request's KV, so its blocks may not change: never preempted."""
        self.is_seated = False
        """A beam keeps it, and shares its fate with the other rows of the search."""
        self.keep_at = 0
        """Leading tokens behind which the states of linear layers are kept for others: a chunk
        ends there. 0: nowhere."""
        eos = () if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset((*eos, *sampling.stop_token_ids))
        """Tokens that may end the output (not before `min_tokens`)."""
        self.check_len = max_len
        """Confirmed tokens at which a full block can be published or the output ends."""

    @property
    def is_gone(self) -> bool:
        return self.phase is RowPhase.GONE

    @property
    def is_alone(self) -> bool:
        """Returns whether neither choices nor beams go on with what it has."""
        return not (self.request.choice_ids or self.request.is_beam)

    @property
    def may_decode_at_once(self) -> bool:
        """Returns whether its last known token may be computed as a decode's. It may not where
        others go on with the states behind it, or read its KV by chunks, or where more than the
        next token is wanted of it."""
        request, spec = self.request, self.request.spec
        draws_others = spec.sibling_seeds and not request.knows_first_token
        is_more = draws_others or spec.images or request.needs_prompt_logprobs
        return self.num_reserved > 0 and self.is_alone and not (self.is_exported or is_more)

    @property
    def remaining_prefill(self) -> int:
        return self.prefill_len - self.num_reserved

    def num_certain(self, num_reserved: int, query_len: int) -> int:
        """Returns how many leading tokens have KV at least, behind PREFILL and once all scheduled
        steps are done: each of them, whatever it reserved (`query_len` at most), adds one."""
        confirmed = len(self.tokens) - 1
        return confirmed - (confirmed - num_reserved) // query_len

    def confirm_fewer(self, count: int) -> None:
        """Corrects a row when a result names `count` tokens fewer than its step had reserved."""
        self.num_reserved -= count
        self.reserved_base -= count


class RowTable:
    """Gives rows out, each time with a new epoch."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[Row | None] = [None] * num_rows  # [row index]
        self.stop_ids: set[int] = set()
        """Tokens that may end the output of a row, or might have that of an earlier one."""
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

    def assign(self, request: Request, blocks: RequestBlocks, key: SortKey, max_len: int) -> Row:
        """Raises `IndexError` when no row is free."""
        index = self._free.pop()
        self._epochs[index] += 1
        row = Row(index, self._epochs[index], request, blocks, key, max_len)
        self.rows[index] = row
        self.stop_ids |= row.stop_ids
        request.row = row.index
        return row

    def release(self, row: Row) -> None:
        row.phase = RowPhase.GONE
        row.request.row = -1
        self.rows[row.index] = None
        self._free.append(row.index)

    def of(self, request: Request) -> Row:
        """Returns the row of a running request."""
        row = self.rows[request.row]
        assert row is not None
        return row
