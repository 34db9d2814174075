"""Both halves of a connector without a network: for tests, and for measuring an engine alone.

Every transfer succeeds at once, after some polls, or fails, as `FakeTransfers` says. No KV
moves: a consumer's blocks keep what they had.

    1. `update_state_after_alloc` (consumer) or the last chunk (producer) starts a transfer
    2. each `get_finished` counts as one poll
    3. after `delay_polls` of them it is reported
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.base import (
    ChunkLike,
    KVCacheHandle,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestLike,
)
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVPeer,
    KVTransferParams,
    TransferStats,
)

_Report = Callable[[KVConnectorOutput], None]


@dataclass(slots=True, kw_only=True)
class FakeTransfers:
    """What happens to transfers. May be changed between polls.

    Attributes:
        delay_polls: `get_finished` calls that pass before a transfer is reported.
        failures: The next so many transfers fail.
        reason, retryable: How they fail.
    """

    delay_polls: int = 0
    failures: int = 0
    reason: str = "the fake connector was told to fail"
    retryable: bool = True


@dataclass(slots=True)
class _Pending:
    polls_left: int
    report: _Report


@dataclass(slots=True)
class _Offer:
    num_tokens: int
    computed: int = 0


class FakeConnectorScheduler(KVConnectorScheduler):
    """Scheduler half of either role."""

    def __init__(
        self,
        config: KVTransferConfig,
        engine_id: str,
        epoch: int,
        layout: KVLayout,
        transfers: FakeTransfers | None = None,
    ) -> None:
        self.transfers = transfers or FakeTransfers()
        self._is_producer = config.kv_role == "kv_producer"
        self._peer = KVPeer(engine_id=engine_id, epoch=epoch, layout=layout)
        self._pending: dict[str, _Pending] = {}
        self._offers: dict[str, _Offer] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._totals = {"transfers": 0.0, "failures": 0.0}

    @property
    def peer_info(self) -> KVPeer:
        return self._peer

    def get_num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> int:
        params = request.kv_transfer_params
        if self._is_producer or params is None or not params.do_remote_prefill:
            return 0
        return max(0, request.num_prompt_tokens - num_computed_tokens)

    def update_state_after_alloc(
        self, request: RequestLike, block_ids: list[int], num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        if params is None:
            return
        if params.do_remote_decode:
            self._offers.setdefault(params.transfer_id, _Offer(request.num_prompt_tokens))
        elif num_external_tokens > 0:
            self._begin(params.transfer_id, _report_received)

    def build_connector_meta(
        self, step_id: int, chunks: list[ChunkLike]
    ) -> KVConnectorMetadata | None:
        save = False
        for chunk in chunks:
            params = chunk.request.kv_transfer_params
            offer = self._offers.get(params.transfer_id) if params is not None else None
            if params is None or offer is None:
                continue
            save = True
            offer.computed = chunk.first_token + chunk.num_tokens
            if offer.computed >= offer.num_tokens:
                self._begin(params.transfer_id, self._report_sent)
        return KVConnectorMetadata(save_kv=True) if save else None

    def fileno(self) -> int:
        return self._wakeup

    def get_finished(self) -> KVConnectorOutput | None:
        output = KVConnectorOutput()
        due = [name for name, entry in self._pending.items() if entry.polls_left <= 0]
        for entry in self._pending.values():
            entry.polls_left -= 1
        for transfer_id in due:
            self._pending.pop(transfer_id).report(output)
        if not self._pending:
            self._rest()
        return output if due else None

    def request_finished(self, request: RequestLike) -> bool:
        params = request.kv_transfer_params
        offer = self._offers.get(params.transfer_id) if params is not None else None
        return offer is not None

    def abort(self, request: RequestLike) -> bool:
        params = request.kv_transfer_params
        if params is None:
            return False
        transfer_id = params.transfer_id
        known = self._offers.pop(transfer_id, None) is not None or transfer_id in self._pending
        if known:
            self._enqueue(transfer_id, lambda output: output.aborted.append(transfer_id))
        return known

    def retry(
        self,
        request: RequestLike,
        params: KVTransferParams,
        block_ids: list[int],
        num_computed_tokens: int,
    ) -> None:
        self._begin(params.transfer_id, _report_received)

    @property
    def counters(self) -> dict[str, float]:
        live = float(len(self._pending) + len(self._offers))
        return {**self._totals, "staged_bytes": 0.0, "leases": live, "live_transfers": live}

    def check_alive(self) -> None:
        return

    def shutdown(self) -> None:
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1

    def _begin(self, transfer_id: str, succeed: Callable[[str, KVConnectorOutput], None]) -> None:
        self._totals["transfers"] += 1
        if self.transfers.failures > 0:
            self.transfers.failures -= 1
            self._totals["failures"] += 1
            why = (self.transfers.reason, self.transfers.retryable)
            self._enqueue(transfer_id, lambda output: self._report_failed(transfer_id, why, output))
        else:
            self._enqueue(transfer_id, lambda output: succeed(transfer_id, output))

    def _enqueue(self, transfer_id: str, report: _Report) -> None:
        self._pending[transfer_id] = _Pending(self.transfers.delay_polls, report)
        os.eventfd_write(self._wakeup, 1)

    def _rest(self) -> None:
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return

    def _report_failed(
        self, transfer_id: str, why: tuple[str, bool], output: KVConnectorOutput
    ) -> None:
        self._offers.pop(transfer_id, None)
        output.failed[transfer_id] = why

    def _report_sent(self, transfer_id: str, output: KVConnectorOutput) -> None:
        self._offers.pop(transfer_id, None)
        output.finished_sending.append(transfer_id)
        output.released.append(transfer_id)
        output.stats[transfer_id] = TransferStats()


def _report_received(transfer_id: str, output: KVConnectorOutput) -> None:
    output.finished_recving.append(transfer_id)
    output.stats[transfer_id] = TransferStats()


@dataclass(slots=True)
class FakeConnectorWorker(KVConnectorWorker):
    """Worker half: remembers what it was told."""

    rank: int = 0
    saved: list[tuple[int, int]] = field(default_factory=list)
    """(step, layer) in order, for steps whose KV somebody waits for."""
    _step_id: int = -1
    _saving: bool = False

    def register_kv_caches(
        self, kv_caches: list[Any], current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        return KVCacheHandle(
            rank=self.rank, pid=os.getpid(), fd=-1, num_blocks=len(kv_caches[0]) if kv_caches else 0
        )

    def start_load_kv(self, step_id: int, metadata: KVConnectorMetadata) -> None:
        self._step_id = step_id
        self._saving = metadata.save_kv

    def save_kv_layer(self, layer: int) -> None:
        if self._saving:
            self.saved.append((self._step_id, layer))

    def shutdown(self) -> None:
        return
