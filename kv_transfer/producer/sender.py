"""Producer: copies KV out of the blocks as layers finish, and keeps it until it was pulled.

    1. OfferMeta      a transfer opens; its lease starts; pulls that came early go on
    2. SendMeta,      chunks become ready; pullers that keep up take them from the blocks
       StepProgress   (`zero_copy_sends`), the others are copied into staging memory (`stager`)
    3. all staged     STAGED: the blocks may be freed
    4. pulls          read staged chunks; each message that leaves renews the lease
    5. the end        Release ──▶ RELEASED, or ABORTED if the puller gives up; AbortMeta ──▶
                      ABORTED, lease over ──▶ FAILED: staged memory is free, open pulls stop
    -  a Release may come before its offer, which ends at once then

Everything runs on one event loop. On a device copies run beside it; once a transfer has ended, a
copy that is on its way may still read its blocks, but nobody looks at what it read. Threads that
send from blocks are waited for before the end is told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import KVTransferError
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagingPool
from kv_transfer.metadata import (
    AbortMeta,
    OfferMeta,
    Reclaim,
    SendMeta,
    StepProgress,
    TransferEvent,
    TransferEventKind,
    TransferStats,
)
from kv_transfer.producer.early_pulls import EarlyPulls
from kv_transfer.producer.send_transfer import Pull, SendTransfer, SentChunk
from kv_transfer.state import KVTransferState, LateMessage, TransferTable
from kv_transfer.transports.cuda_ipc.read_leases import ReadLeases
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.transports.stream.stager import Stager
from kv_transfer.transports.stream.zero_copy_sends import ZeroCopySends
from kv_transfer.wire.chunk import HEADER, ChunkKind
from kv_transfer.wire.chunk_grid import ChunkGrid, longest_chunk
from kv_transfer.wire.handshake import LocalCache
from kv_transfer.wire.out_message import OutMessage
from kv_transfer.wire.pull_wish import PullWish

logger = logging.getLogger(__name__)

_RESERVE_CHUNKS = 4
_GAVE_UP = "the puller gave up"
_END_OF = {
    Reclaim.RELEASED: KVTransferState.DONE,
    Reclaim.GIVEN_UP: KVTransferState.ABORTED,
    Reclaim.ABORTED: KVTransferState.ABORTED,
}
_EVENT_OF = {
    KVTransferState.DONE: TransferEventKind.RELEASED,
    KVTransferState.FAILED: TransferEventKind.FAILED,
    KVTransferState.ABORTED: TransferEventKind.ABORTED,
}


class KVSender:
    """One transfer process of one rank. `emit` takes events for the scheduler half."""

    def __init__(
        self,
        config: KVTransferConfig,
        layout: KVLayout,
        rank: int,
        index: int,
        cache: KVCacheView,
        emit: Callable[[TransferEvent], None],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._layout = layout
        self._rank = rank
        self._index = index
        self._process = rank * config.num_processes + index
        self._cache = cache
        self._emit_event = emit
        self._on_change = on_change
        self._holds = ReadLeases()
        self._messages = ChunkMessages(layout, rank, config.chunk_bytes, self._holds)
        chunk_bytes = HEADER.size + longest_chunk(layout, config.chunk_bytes)
        capacity = config.process_staging_bytes
        reserve = min(_RESERVE_CHUNKS, capacity // chunk_bytes // 2)
        self.pool = StagingPool(capacity, chunk_bytes, reserve)
        cache.device.pin(self.pool.memory)
        self._straight = ZeroCopySends(
            cache,
            self.pool,
            self._messages,
            self.was_sent,
            self._left_the_blocks,
        )
        self._transfers: TransferTable[SendTransfer] = TransferTable()
        self._stager = Stager(
            self._transfers,
            cache,
            self.pool,
            self._messages,
            self._straight,
            self._chunk_staged,
            self._cannot_stage,
        )
        self.early_pulls = EarlyPulls()
        self._progress = StepProgress(0, 0)
        self._pullers: dict[int, tuple[int, ...]] = {}
        """By size of the puller's node, see `_num_pullers`."""
        self.num_pulls = 0
        self.bytes_sent = 0
        self.reclaimed: Counter[Reclaim] = Counter()
        """Transfers that have ended, by why their memory became free."""

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def leases_expired(self) -> int:
        return self.reclaimed[Reclaim.LEASE_ENDED]

    # What the scheduler and the worker say ----------------------------------------------------

    def offer(self, meta: OfferMeta) -> None:
        transfer = SendTransfer(
            meta,
            self._layout,
            self._config.chunk_bytes,
            self._index,
            self._config.num_processes,
        )
        try:
            self._transfers.open(meta.transfer_id, meta.attempt, transfer)
        except LateMessage:
            self._end_unopened(transfer)
            return
        self._renew(transfer)
        if self._straight.is_possible or self.cache_for_host() is not None:
            self._stager.wait_for_puller(transfer)
        self._report_if_staged(transfer)
        self.early_pulls.offered(meta.transfer_id)
        self._on_change()

    def send(self, meta: SendMeta) -> None:
        transfer = self._transfers.find(meta.transfer_id, meta.attempt)
        if transfer is None:
            return
        self._transfers.activate(meta.transfer_id, meta.attempt)
        self._renew(transfer)
        try:
            self._cache.check_blocks(meta.block_ids, 0, transfer.num_tokens)
            transfer.announce(meta, self._progress)
            transfer.name_ready()
        except ValueError as error:
            self._end(transfer, Reclaim.ERROR, str(error))
        self._stager.wake()

    def progress(self, progress: StepProgress) -> None:
        """Only ever grows; older messages may come late."""
        now = (self._progress.step_id, self._progress.num_layers_done)
        if (progress.step_id, progress.num_layers_done) <= now:
            return
        self._progress = progress
        for transfer in self._transfers:
            transfer.advance(progress)
            transfer.name_ready()
        self._stager.wake()

    def abort(self, meta: AbortMeta) -> None:
        transfer = self._transfers.find(meta.transfer_id, meta.attempt)
        if transfer is not None:
            self._end(transfer, Reclaim.ABORTED, "called off by the prefill node")
        elif not self._transfers.is_late(meta.transfer_id, meta.attempt):
            self._transfers.refuse(meta.transfer_id, meta.attempt)
            self._emit_event(
                TransferEvent(
                    TransferEventKind.ABORTED, meta.transfer_id, meta.attempt, self._process
                )
            )

    # What pullers ask -------------------------------------------------------------------------

    def find(self, transfer_id: str, attempt: int) -> SendTransfer | None:
        """Raises `LateMessage` when this attempt has ended."""
        if self._transfers.is_late(transfer_id, attempt):
            raise LateMessage(f"transfer {transfer_id} attempt {attempt} has ended")
        return self._transfers.find(transfer_id, attempt)

    def cache_for_host(self) -> LocalCache | None:
        """How a puller on this host reads our cache; None: it may not."""
        shares = self._config.shares_memory(self._cache.device.is_gpu)
        return LocalCache(self._cache.handle, self._holds.file) if shares else None

    def open_pull(self, transfer: SendTransfer, wish: PullWish) -> Pull:
        """Raises KVTransferError when this process does not hold what is asked for."""
        wish.check(self._layout, self._index, self._config.num_processes, transfer.num_tokens)
        share = self._layout.share(self._rank, wish.rank, wish.tp_size)
        if not any(page.num_bytes for page in share):
            raise KVTransferError(f"rank {wish.rank} of {wish.tp_size} takes nothing from this one")
        num_pullers = self._num_pullers(wish.tp_size)
        grid = self._grid_of(transfer, wish)
        goes_straight = self._straight.suits(transfer, wish, share, num_pullers, grid)
        pull = Pull(transfer, wish, share, num_pullers, grid, goes_straight)
        transfer.pulls.add(pull)
        transfer.name_ready()
        transfer.num_pulls_seen += 1
        self._transfers.activate(transfer.transfer_id, transfer.attempt)
        self._renew(transfer)
        self.num_pulls += 1
        self._stager.wake()
        self._on_change()
        return pull

    def close_pull(self, pull: Pull) -> None:
        pull.transfer.pulls.discard(pull)
        self.num_pulls -= 1
        self._on_change()

    def next_message(self, pull: Pull) -> OutMessage | None:
        """What this pull is sent next; None: there is nothing more now. Raises `CorruptChunk` for
        a repeat of what has left staging memory, or never was there."""
        entries = pull.next_entries()
        if not entries:
            return self._straight.next_message(pull)
        chunk, message = entries[0].chunk, self._messages.message_for(pull, entries)

        def on_end(is_sent: bool) -> None:
            if is_sent:
                self.was_sent(pull, entries[0], len(message) - HEADER.size)
            if chunk is not None:
                self.pool.unpin(chunk)

        if chunk is not None:
            self.pool.pin(chunk)
        return OutMessage([message], on_end)

    def was_sent(self, pull: Pull, entry: SentChunk | None, num_bytes: int) -> None:
        """`entry` None: the chunk went straight from the blocks."""
        transfer = pull.transfer
        self._renew(transfer)
        transfer.num_bytes_sent += num_bytes
        self.bytes_sent += num_bytes
        self._on_change()
        if pull.wish.repeat or entry is None:
            return
        entry.num_sent += 1
        if entry.chunk is not None and entry.num_sent >= pull.num_pullers_of(entry):
            self.pool.mark_sent(entry.chunk)
            self._stager.wake()

    def release(self, transfer_id: str, attempt: int, complete: bool) -> bool:
        """The puller needs no more. False: unknown, or ended before; it cannot come back."""
        transfer = self._transfers.find(transfer_id, attempt)
        if transfer is None:
            state = _END_OF[Reclaim.RELEASED if complete else Reclaim.GIVEN_UP]
            self._transfers.refuse(transfer_id, attempt, state)
            return False
        if not complete:
            self._end(transfer, Reclaim.GIVEN_UP, _GAVE_UP, retryable=False)
            return True
        if not transfer.is_staged or transfer.needs_blocks:
            self._emit(TransferEventKind.STAGED, transfer)
        self._transfers.activate(transfer_id, attempt)
        self._end(transfer, Reclaim.RELEASED, "released")
        return True

    # Tasks ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stages and sweeps until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stager.run())
            tasks.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._config.lease_s / 4))
            now = time.monotonic()
            for transfer in self._transfers:
                if any(not pull.is_writing for pull in transfer.pulls):
                    self._renew(transfer)
                elif transfer.lease_ends_at <= now:
                    self._end_lease(transfer)

    def _end_lease(self, transfer: SendTransfer) -> None:
        num_bytes = sum(entry.chunk.num_bytes for entry in transfer.staged if entry.chunk)
        logger.warning(
            "transfer %s: nobody pulled for %g s; %d bytes of staged KV are dropped",
            transfer.transfer_id, self._config.lease_s, num_bytes,
        )  # fmt: skip
        self._end(
            transfer,
            Reclaim.LEASE_ENDED,
            f"nobody pulled for {self._config.lease_s:g} s: the lease has ended",
        )

    # Small parts ------------------------------------------------------------------------------

    def _grid_of(self, transfer: SendTransfer, wish: PullWish) -> ChunkGrid:
        """Returns what of the transfer's grid is wanted. Raises KVTransferError."""
        chunk_bytes, num_tokens = self._config.chunk_bytes, transfer.num_tokens
        grid = ChunkGrid.of(self._layout, chunk_bytes, wish.first_token, num_tokens)
        for wanted, staged in zip(grid.groups, transfer.grid.groups, strict=True):
            if wanted.first_block < staged.first_block:
                raise KVTransferError("tokens are asked for that the puller was said to hold")
        return grid

    def _num_pullers(self, tp_size: int) -> tuple[int, ...]:
        """Returns how many ranks of such a puller carry a chunk of each group."""
        if tp_size not in self._pullers:
            self._pullers[tp_size] = self._layout.num_pullers(self._rank, tp_size)
        return self._pullers[tp_size]

    def mark(self, kind: ChunkKind, transfer_id: str, attempt: int) -> bytes:
        """A message without KV."""
        return self._messages.mark(kind, transfer_id, attempt)

    def _left_the_blocks(self, transfer: SendTransfer) -> None:
        """One more chunk has; or it could not, and has to be staged."""
        self._report_if_staged(transfer)
        self._stager.wake()

    def _chunk_staged(self, transfer: SendTransfer) -> None:
        """Also one whose transfer has ended meanwhile: its room is free."""
        if not transfer.end_reason:
            self._report_if_staged(transfer)
        self._on_change()

    def _cannot_stage(self, transfer: SendTransfer, reason: str) -> None:
        self._end(transfer, Reclaim.ERROR, reason, retryable=False)

    def _renew(self, transfer: SendTransfer) -> None:
        transfer.lease_ends_at = time.monotonic() + self._config.lease_s

    def _report_if_staged(self, transfer: SendTransfer) -> None:
        if transfer.take_staged():
            self._emit(TransferEventKind.STAGED, transfer)

    def _end(
        self, transfer: SendTransfer, why: Reclaim, reason: str, retryable: bool = True
    ) -> None:
        state = _END_OF.get(why, KVTransferState.FAILED)
        if self._transfers.end(transfer.transfer_id, transfer.attempt, state) is None:
            return
        self.reclaimed[why] += 1
        transfer.end(reason)
        for entry in transfer.staged:
            if entry.chunk is not None:
                self.pool.drop(entry.chunk)
        transfer.staged.clear()
        # The blocks are free with this event, so no thread may still be sending from them.
        self._straight.let_go(
            transfer, lambda: self._emit(_EVENT_OF[state], transfer, reason, retryable)
        )
        self._stager.wake()
        self._on_change()

    def _end_unopened(self, transfer: SendTransfer) -> None:
        """The puller was done with it before it was offered, or wants a newer attempt."""
        state = self._transfers.state(transfer.transfer_id, transfer.attempt)
        why = Reclaim.RELEASED if state is KVTransferState.DONE else Reclaim.GIVEN_UP
        self.reclaimed[why] += 1
        self._emit(_EVENT_OF[_END_OF[why]], transfer, f"{_GAVE_UP} before", retryable=False)
        self._on_change()

    def _emit(
        self,
        kind: TransferEventKind,
        transfer: SendTransfer,
        reason: str = "",
        retryable: bool = True,
    ) -> None:
        stats = TransferStats(
            num_bytes=transfer.num_bytes_sent,
            num_streams=transfer.num_pulls_seen,
            layers=transfer.layer_times.all if kind is TransferEventKind.RELEASED else (),
        )
        self._emit_event(
            TransferEvent(
                kind,
                transfer.transfer_id,
                transfer.attempt,
                self._process,
                stats,
                "" if kind is TransferEventKind.RELEASED else reason,
                retryable,
            )
        )
