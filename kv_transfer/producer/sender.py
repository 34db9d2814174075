"""Producer: exports KV as layers finish, and keeps it until it was pulled.

    1. ExportMeta     a transfer opens; its lease starts; pulls that came early go on
    2. SendMeta,      chunks become ready, and the transports learn of them
       StepProgress
    3. STAGED         no transport needs the blocks any more: they may be freed
    4. pulls          each message that leaves renews the lease, 20 times as long as it is at most
                      behind the last token
    5. the end        Release ──▶ RELEASED, or ABORTED if the puller gives up; AbortMeta ──▶
                      ABORTED, lease over ──▶ FAILED: nothing is kept, open pulls stop
    -  a Release may come before its export, which ends at once then

Everything runs on one event loop. Threads that transports let read blocks are waited for before the
end is sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

from edge.h2.rpc_method import RpcMethod
from edge.standstill import sleep_and_see
from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import KVTransferError, NotServed
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import (
    AbortMeta,
    ExportMeta,
    Reclaim,
    SendMeta,
    StepProgress,
    TransferEvent,
    TransferEventKind,
    TransferStats,
)
from kv_transfer.producer.early_pulls import EarlyPulls
from kv_transfer.producer.send_transfer import SendTransfer
from kv_transfer.stages import positions_of
from kv_transfer.state import KVTransferState, LateMessage, TransferTable
from kv_transfer.transports.base import Export, ExportOwner, TransportId
from kv_transfer.transports.open_pull import OpenPull, PullTerms
from kv_transfer.transports.registry import producer_transports
from kv_transfer.wire.chunk_grid import ChunkGrid
from kv_transfer.wire.pull_spec import PullSpec

logger = logging.getLogger(__name__)

_GAVE_UP = "the puller gave up"
_MOST_LEASES = 20
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


class KVSender(ExportOwner):
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
        self.transports = producer_transports(config, layout, rank, cache, self)
        self._transfers: TransferTable[SendTransfer] = TransferTable()
        self.early_pulls = EarlyPulls()
        self._progress = StepProgress(0, 0)
        self._pullers: dict[int, tuple[int, ...]] = {}
        """Pullers by size of their node, see `_num_pullers`."""
        self.num_pulls = 0
        self.bytes_sent = 0
        self.reclaimed: Counter[Reclaim] = Counter()
        """Transfers that have ended, by why their memory became free."""

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def staged_bytes(self) -> int:
        return sum(transport.staged_bytes for transport in self.transports)

    @property
    def leases_expired(self) -> int:
        return self.reclaimed[Reclaim.LEASE_ENDED]

    # What the scheduler and the worker say ----------------------------------------------------

    def export(self, meta: ExportMeta) -> None:
        share = (self._index, self._config.num_processes)
        transfer = SendTransfer(meta, self._layout, self._config.chunk_bytes, share)
        try:
            self._transfers.open(meta.transfer_id, meta.attempt, transfer)
        except LateMessage:
            self._end_unopened(transfer)
            return
        transfer.parts = {transport.id: transport.open(transfer) for transport in self.transports}
        self._renew(transfer)
        self.left_blocks(transfer)
        self.early_pulls.exported(meta.transfer_id)
        self.changed()

    def send(self, meta: SendMeta) -> None:
        transfer = self._transfers.find(meta.transfer_id, meta.attempt)
        if transfer is None:
            return
        self._transfers.activate(meta.transfer_id, meta.attempt)
        self._renew(transfer)
        try:
            self._cache.check_blocks(meta.block_ids, 0, transfer.num_tokens)
            transfer.announce(meta, self._progress)
        except ValueError as error:
            self._end(transfer, Reclaim.ERROR, str(error))

    def progress(self, progress: StepProgress) -> None:
        """Takes progress, which only ever grows; older messages may come late."""
        now = (self._progress.step_id, self._progress.num_layers_done)
        if (progress.step_id, progress.num_layers_done) <= now:
            return
        self._progress = progress
        for transfer in self._transfers:
            transfer.advance(progress)

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

    def advertise(self, puller_host: str) -> dict[TransportId, bytes]:
        """Returns what a puller with this `host_id` must know of each transport that it can use."""
        said = {transport.id: transport.advertise(puller_host) for transport in self.transports}
        return {name: data for name, data in said.items() if data is not None}

    def find(self, transfer_id: str, attempt: int) -> SendTransfer | None:
        """Raises `LateMessage` when this attempt has ended."""
        if self._transfers.is_late(transfer_id, attempt):
            raise LateMessage(f"transfer {transfer_id} attempt {attempt} has ended")
        return self._transfers.find(transfer_id, attempt)

    def open_pull(self, transfer: SendTransfer, spec: PullSpec) -> OpenPull:
        """Raises KVTransferError when this process does not hold what is asked for."""
        spec.check(self._layout, self._index, self._config.num_processes, transfer.num_tokens)
        share = self._layout.share(self._rank, spec.rank, spec.tp_size)
        if not any(page.num_bytes for page in share):
            raise KVTransferError(f"rank {spec.rank} of {spec.tp_size} takes nothing from this one")
        part = transfer.parts.get(spec.transport)
        if part is None:
            raise NotServed(f"transport {spec.transport} is not open here")
        chunk_bytes, num_tokens = self._config.chunk_bytes, transfer.num_tokens
        grid = ChunkGrid.of(self._layout, chunk_bytes, spec.first_token, num_tokens)
        layers = tuple(positions_of(group.layers, spec.layers) for group in self._layout.groups)
        stripe = grid.stripe_of(share, spec.stream, spec.num_streams, layers)
        if spec.repeat and not spec.repeat.issubset(stripe):
            raise KVTransferError("a chunk is asked for again that this stream does not carry")
        transfer.narrow(grid)
        num_pullers = self._num_pullers(spec.tp_size)
        pull = part.open_pull(PullTerms(spec, share, num_pullers, grid, layers))
        transfer.pulls.add(pull)
        transfer.num_pulls_seen += 1
        self._transfers.activate(transfer.transfer_id, transfer.attempt)
        self._renew(transfer)
        self.left_blocks(transfer)
        self.num_pulls += 1
        self.changed()
        return pull

    def close_pull(self, transfer: SendTransfer, pull: OpenPull) -> None:
        transfer.pulls.discard(pull)
        part = transfer.parts.get(pull.spec.transport)
        if part is not None:
            part.close_pull(pull)
        self.num_pulls -= 1
        self.changed()

    def release(self, transfer_id: str, attempt: int, complete: bool) -> bool:
        """The puller needs no more. Returns False for a transfer that is unknown, or ended before;
        it cannot come back."""
        transfer = self._transfers.find(transfer_id, attempt)
        if transfer is None:
            state = _END_OF[Reclaim.RELEASED if complete else Reclaim.GIVEN_UP]
            self._transfers.refuse(transfer_id, attempt, state)
            return False
        if not complete:
            self._end(transfer, Reclaim.GIVEN_UP, _GAVE_UP, retryable=False)
            return True
        if not transfer.is_staged:
            self._emit(TransferEventKind.STAGED, transfer)
        self._transfers.activate(transfer_id, attempt)
        self._end(transfer, Reclaim.RELEASED, "released")
        return True

    # What transports say ----------------------------------------------------------------------

    def was_sent(self, export: Export, num_bytes: int) -> None:
        assert isinstance(export, SendTransfer)
        self._renew(export)
        export.num_bytes_sent += num_bytes
        self.bytes_sent += num_bytes
        self.changed()

    def left_blocks(self, export: Export) -> None:
        assert isinstance(export, SendTransfer)
        if not export.is_staged and not export.end_reason and export.blocks_are_free:
            export.is_staged = True
            self._emit(TransferEventKind.STAGED, export)
        self.changed()

    def fail(self, export: Export, reason: str) -> None:
        assert isinstance(export, SendTransfer)
        self._end(export, Reclaim.ERROR, reason, retryable=False)

    def changed(self) -> None:
        """Records that what is reported has changed."""
        self._on_change()

    # Tasks ------------------------------------------------------------------------------------

    async def listen(self, methods: Mapping[str, RpcMethod]) -> None:
        """Serves `methods` where transports carry calls themselves."""
        for transport in self.transports:
            await transport.listen(methods)

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()

    async def run(self) -> None:
        """Lets transports work, and sweeps, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for transport in self.transports:
                tasks.create_task(transport.run())
            tasks.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        """Leases run while this process does: when it was held up, what peers asked meanwhile is
        not read yet."""
        pause_s = min(1.0, self._config.lease_s / 4)
        while True:
            late_s = await sleep_and_see(pause_s)
            now = time.monotonic()
            for transfer in self._transfers:
                transfer.lease_ends_at += late_s
                if any(not pull.is_writing for pull in transfer.pulls):
                    self._renew(transfer)
                if transfer.lease_ends_at <= now:
                    self._end_lease(transfer)

    def _end_lease(self, transfer: SendTransfer) -> None:
        lease_s = self._config.lease_s
        if time.monotonic() < transfer.lease_capped_at:
            why = f"it was not pulled for {lease_s:g} s"
        else:
            why = f"it was pulled for {_MOST_LEASES * lease_s:g} s and not released"
        logger.warning("transfer %s: %s; its KV is dropped", transfer.transfer_id, why)
        self._end(transfer, Reclaim.LEASE_ENDED, f"{why}: the lease has ended")

    # Small parts ------------------------------------------------------------------------------

    def _num_pullers(self, tp_size: int) -> tuple[int, ...]:
        """Returns how many ranks of such a puller carry a chunk of each group."""
        if tp_size not in self._pullers:
            self._pullers[tp_size] = self._layout.num_pullers(self._rank, tp_size)
        return self._pullers[tp_size]

    def _renew(self, transfer: SendTransfer) -> None:
        """Is called as long as a puller works; one that never ends does not hold the KV for
        ever."""
        now, lease_s = time.monotonic(), self._config.lease_s
        if transfer.is_computed and math.isinf(transfer.lease_capped_at):
            transfer.lease_capped_at = now + _MOST_LEASES * lease_s
        transfer.lease_ends_at = min(now + lease_s, transfer.lease_capped_at)

    def _end(
        self, transfer: SendTransfer, why: Reclaim, reason: str, retryable: bool = True
    ) -> None:
        state = _END_OF.get(why, KVTransferState.FAILED)
        if self._transfers.end(transfer.transfer_id, transfer.attempt, state) is None:
            return
        self.reclaimed[why] += 1
        transfer.end_reason = reason
        parts, transfer.parts = transfer.parts, {}
        for pull in transfer.pulls:
            pull.wake.set()
        num_left = len(parts)

        def one_less() -> None:
            # The blocks are free with this event, so no thread may still be reading them.
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                self._emit(_EVENT_OF[state], transfer, reason, retryable)

        for part in parts.values():
            part.end(one_less)
        self.changed()

    def _end_unopened(self, transfer: SendTransfer) -> None:
        """The puller was done with it before it was exported, or wants a newer attempt."""
        state = self._transfers.state(transfer.transfer_id, transfer.attempt)
        why = Reclaim.RELEASED if state is KVTransferState.DONE else Reclaim.GIVEN_UP
        self.reclaimed[why] += 1
        self._emit(_EVENT_OF[_END_OF[why]], transfer, f"{_GAVE_UP} before", retryable=False)
        self.changed()

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
