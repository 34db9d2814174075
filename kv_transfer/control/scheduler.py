"""The half beside the scheduler: commands to transfer processes, and what becomes of them.

Producer, for one transfer                       Consumer
    1. export                                        1. pull, on every process
    2. a cached prefix; then each prompt chunk       2. all RECEIVED ──▶ finished_recving,
    3. all STAGED ──▶ finished_sending                  and the peer is asked to release
    4. all RELEASED ──▶ released

FAILED on one process, or ABORTED because the puller gave up, calls the transfer off on the others;
it is reported when the last of them has answered, so no writer or reader is left: the engine core
passes it to the source of the transfer. A process that dies, or is frozen and therefore killed,
answers FAILED by its death.
"""

from __future__ import annotations

from collections.abc import Sequence

from host.life_signs import LifeSigns
from host.process_host import ProcessHost
from kv_transfer.base import ChunkLike, KVCacheHandle, KVConnectorScheduler, RequestLike
from kv_transfer.config import TRANSPORTS, KVTransferConfig
from kv_transfer.control.node_transfer import NodeTransfer, Outcome
from kv_transfer.control.own_host import check_own
from kv_transfer.control.transfer_processes import TransferProcesses
from kv_transfer.layout import BlockIds, KVLayout, of_every_group
from kv_transfer.memory.load_marks import LoadMarksOfRanks
from kv_transfer.metadata import (
    AbortMeta,
    ComputedMeta,
    ExportMeta,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVPeer,
    KVTransferParams,
    Reclaim,
    RecvMeta,
    ReleaseMeta,
    SendMeta,
    TransferCommand,
    TransferEvent,
    TransferEventKind,
    is_transfer_id,
)
from kv_transfer.state import KVTransferState, LateMessage, TransferTable
from kv_transfer.tiers.host_tier import PooledHostTier

_COMPUTED_ALREADY = -1

_END_STATES = {
    Outcome.DONE: KVTransferState.DONE,
    Outcome.FAILED: KVTransferState.FAILED,
    Outcome.ABORTED: KVTransferState.ABORTED,
}


class GrpcConnectorScheduler(KVConnectorScheduler):
    """Scheduler half of either role, or both. Owns the transfer processes of the node."""

    def __init__(
        self,
        config: KVTransferConfig,
        engine_id: str,
        epoch: int,
        layout: KVLayout,
        handles: list[KVCacheHandle],
        hosts: Sequence[ProcessHost] = (),
        signs: LifeSigns | None = None,
    ) -> None:
        self._sends = config.sends
        if config.sends and not any(host.link for host in hosts):
            check_own(config.hosts)
        self._engine_id = engine_id
        self._epoch = epoch
        self._layout = layout
        self._processes = TransferProcesses(config, engine_id, epoch, layout, handles, hosts, signs)
        self._load_marks = LoadMarksOfRanks(layout, handles, hosts)
        self._tier: PooledHostTier | None = None
        num_slots = config.num_host_slots(layout.block_bytes)
        if num_slots:
            self.host_tier = self._tier = PooledHostTier(
                num_slots,
                len(self._processes),
                self._processes.send,
                config.num_disk_blocks(layout.block_bytes),
                self._load_marks.release,
                self._load_marks.num_places,
                has_store=bool(config.store_tier_url),
            )
        self._transfers: TransferTable[NodeTransfer] = TransferTable()
        self._output = KVConnectorOutput()
        self._has_output = False
        self._totals = dict.fromkeys(("transfers", "failures", "aborts", "bytes"), 0.0)

    @property
    def peer_info(self) -> KVPeer:
        return KVPeer(
            engine_id=self._engine_id,
            epoch=self._epoch,
            layout=self._layout,
            endpoints=self._processes.endpoints if self._sends else (),
        )

    @property
    def process_pids(self) -> list[int]:
        """Returns the pids of the transfer processes that run now."""
        return self._processes.pids

    # Both roles -------------------------------------------------------------------------------

    def refusal(self, request: RequestLike) -> str:
        params = request.kv_transfer_params
        if params is None or not params.do_remote_decode:
            return ""
        if not self._transfers.is_late(params.transfer_id, params.attempt):
            return ""
        return f"attempt {params.attempt} of this transfer has ended, or a newer one has begun"

    def get_num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> int:
        params = request.kv_transfer_params
        if params is None or not params.do_remote_prefill:
            return 0
        return max(0, request.num_prompt_tokens - num_computed_tokens)

    def update_state_after_alloc(
        self, request: RequestLike, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        if params is None:
            return
        if params.do_remote_decode:
            self._export(request, params, block_ids)
        elif params.do_remote_prefill:
            first_token = request.num_prompt_tokens - num_external_tokens
            self._pull(params, block_ids, first_token, request.num_prompt_tokens)

    def request_finished(self, request: RequestLike) -> bool:
        params = request.kv_transfer_params
        transfer = self._find(params)
        if params is None or transfer is None or not params.do_remote_decode:
            return False
        # The step's result is here, so every layer is computed on every rank. Saying so makes
        # up for progress messages that a restarting transfer process may have missed.
        self._send_chunk(transfer, _COMPUTED_ALREADY, 0, request.num_prompt_tokens)
        return not transfer.is_staged

    def abort(self, request: RequestLike) -> bool:
        params = request.kv_transfer_params
        if params is None:
            return False
        transfer = self._find(params)
        if transfer is None:
            if params.peer is not None and not self._transfers.is_late(
                params.transfer_id, params.attempt
            ):
                self._transfers.refuse(params.transfer_id, params.attempt)
                self._release(params, complete=False)
            return False
        transfer.abort_requested = True
        self._call_off(transfer)
        return True

    def get_finished(self) -> KVConnectorOutput | None:
        for event in self._processes.receive():
            if isinstance(event, TransferEvent):
                self._apply(event)
            elif self._tier is not None:
                self._tier.apply(event)
        self.check_alive()
        self._take_host_jobs()
        if not self._has_output:
            return None
        output, self._output = self._output, KVConnectorOutput()
        self._has_output = False
        return output

    def _take_host_jobs(self) -> None:
        if self._tier is None:
            return
        if self._tier.store_index is not None:
            found = self._tier.store_index.take_found()
            self._output.store_found.update(found)
            self._has_output |= bool(found)
        finished, begun = self._tier.take_finished(), self._tier.take_begun()
        if finished or begun:
            self._output.host_jobs.update(finished)
            self._output.host_begun += begun
            self._has_output = True

    def fileno(self) -> int:
        return self._processes.fileno()

    @property
    def counters(self) -> dict[str, float]:
        total, tier = self._processes.total, self._tier
        reclaimed, received = map(self._processes.totals, ("reclaimed", "received"))
        return {
            **self._totals,
            **(tier.counters if tier is not None else {}),
            "live_transfers": float(len(self._transfers) + (tier.num_jobs if tier else 0)),
            "staged_bytes": total("staged_bytes"),
            "leases": total("leases"),
            "process_transfers": total("num_transfers"),
            "open_pulls": total("num_pulls"),
            "bytes_moved": total("bytes_moved"),
            "corrupt_chunks": total("corrupt_chunks"),
            "leases_expired": total("leases_expired"),
            **{f"reclaimed_{why}": float(reclaimed[why]) for why in Reclaim},
            **{f"received_bytes_{way}": float(received[way]) for way in TRANSPORTS},
            "processes_ready": float(self._processes.num_ready),
            "process_restarts": float(self._processes.num_restarts),
            "dropped_messages": float(self._processes.num_dropped_messages),
            "plaintext_connections": total("plaintext_connections"),
        }

    def check_alive(self) -> None:
        for process, how in self._processes.reap().items():
            if self._tier is not None:
                self._tier.process_is_gone(process)
            for transfer in self._transfers:
                self._process_is_gone(transfer, process, how)

    def shutdown(self) -> None:
        self._load_marks.close()
        self._processes.shutdown()

    # Producer ---------------------------------------------------------------------------------

    def build_connector_meta(
        self, step_id: int, chunks: list[ChunkLike]
    ) -> KVConnectorMetadata | None:
        save_kv = False
        for chunk in chunks:
            transfer = self._find(chunk.request.kv_transfer_params)
            if transfer is None or not transfer.is_export:
                continue
            save_kv = True
            transfer.block_ids = chunk.block_ids
            if chunk.first_token > transfer.num_announced:
                self._send_chunk(transfer, _COMPUTED_ALREADY, 0, chunk.first_token)
            stop = chunk.first_token + chunk.num_tokens
            self._send_chunk(transfer, step_id, chunk.first_token, stop)
        return KVConnectorMetadata(save_kv=True) if save_kv else None

    def _export(self, request: RequestLike, params: KVTransferParams, block_ids: BlockIds) -> None:
        if self._find(params) is not None:
            return
        self._replace_older(params)
        meta = ExportMeta(params.transfer_id, params.attempt, request.num_prompt_tokens)
        self._open(params, meta)
        if block_ids and (transfer := self._find(params)) is not None:
            transfer.block_ids = block_ids

    def _send_chunk(
        self, transfer: NodeTransfer, step_id: int, first_token: int, stop: int
    ) -> None:
        transfer.num_announced = stop
        self._broadcast(
            transfer,
            SendMeta(
                transfer.params.transfer_id,
                transfer.params.attempt,
                step_id,
                first_token,
                stop - first_token,
                of_every_group(self._layout.groups, transfer.block_ids),
            ),
        )

    # Consumer ---------------------------------------------------------------------------------

    def retry(
        self,
        request: RequestLike,
        params: KVTransferParams,
        block_ids: BlockIds,
        num_computed_tokens: int,
    ) -> None:
        self._pull(params, block_ids, num_computed_tokens, request.num_prompt_tokens)

    def prompt_computed(self, request: RequestLike) -> None:
        transfer = self._find(request.kv_transfer_params)
        if transfer is not None and not transfer.is_export:
            params = transfer.params
            self._broadcast(transfer, ComputedMeta(params.transfer_id, params.attempt))

    def _pull(
        self, params: KVTransferParams, block_ids: BlockIds, first_token: int, num_tokens: int
    ) -> None:
        if params.peer is None:
            raise ValueError(f"transfer {params.transfer_id} names no peer to pull from")
        if first_token >= num_tokens:
            self._transfers.refuse(params.transfer_id, params.attempt)
            self._release(params, complete=True)
            return
        ids = of_every_group(self._layout.groups, block_ids)
        meta = RecvMeta(
            params.transfer_id, params.attempt, params.peer, ids, first_token, num_tokens,
            params.is_prefix,
        )  # fmt: skip
        self._open(params, meta)

    def _release(self, params: KVTransferParams, complete: bool) -> None:
        """Any living process may carry the message; transfers spread over them."""
        if params.peer is None or not is_transfer_id(params.transfer_id):
            return
        message = ReleaseMeta(params.transfer_id, params.attempt, params.peer, complete)
        first = int(params.transfer_id[:8], 16)
        for i in range(len(self._processes)):
            if self._processes.send((first + i) % len(self._processes), message):
                return

    # One transfer over all processes ----------------------------------------------------------

    def _open(self, params: KVTransferParams, command: ExportMeta | RecvMeta) -> None:
        if not is_transfer_id(params.transfer_id):
            self._refuse(params, "a transfer id is 32 lower-case hex digits")
            return
        transfer = NodeTransfer(params, len(self._processes), params.do_remote_decode)
        try:
            self._transfers.open(params.transfer_id, params.attempt, transfer)
        except LateMessage as error:
            self._refuse(params, str(error))
            return
        self._transfers.activate(params.transfer_id, params.attempt)
        self._totals["transfers"] += 1
        self._broadcast(transfer, command)

    def _refuse(self, params: KVTransferParams, reason: str) -> None:
        self._output.failed[params.name] = (reason, False)
        self._has_output = True
        self._processes.wake()

    def _replace_older(self, params: KVTransferParams) -> None:
        """A new attempt means that the older one was given up."""
        attempt = self._transfers.live_attempt(params.transfer_id)
        if attempt is None or attempt >= params.attempt:
            return
        old = self._transfers.end(params.transfer_id, attempt, KVTransferState.ABORTED)
        if old is not None:
            self._broadcast(old, AbortMeta(params.transfer_id, attempt, old.is_export))

    def _broadcast(self, transfer: NodeTransfer, command: TransferCommand) -> None:
        for process in sorted(transfer.unended):
            if not self._processes.send(process, command):
                self._process_is_gone(transfer, process, "it is being restarted")
                self._processes.wake()

    def _find(self, params: KVTransferParams | None) -> NodeTransfer | None:
        return self._transfers.find(params.transfer_id, params.attempt) if params else None

    def _apply(self, event: TransferEvent) -> None:
        transfer = self._transfers.find(event.transfer_id, event.attempt)
        if transfer is None:
            return
        had_failed = transfer.failure is not None
        transfer.apply(event)
        if transfer.failure is not None and not had_failed:
            self._call_off(transfer)
        self._conclude(transfer)

    def _process_is_gone(self, transfer: NodeTransfer, process: int, how: str) -> None:
        if process in transfer.unended:
            params = transfer.params
            self._apply(
                TransferEvent(
                    TransferEventKind.FAILED,
                    params.transfer_id,
                    params.attempt,
                    process,
                    reason=f"a transfer process was lost: {how}",
                )
            )

    def _call_off(self, transfer: NodeTransfer) -> None:
        params = transfer.params
        meta = AbortMeta(params.transfer_id, params.attempt, transfer.is_export)
        self._broadcast(transfer, meta)

    def _conclude(self, transfer: NodeTransfer) -> None:
        params = transfer.params
        if transfer.take_staged():
            self._output.finished_sending.append(params.name)
            self._has_output = True
        outcome = transfer.outcome
        if outcome is None:
            return
        if self._transfers.end(params.transfer_id, params.attempt, _END_STATES[outcome]) is None:
            return
        self._report(transfer, outcome)
        if not transfer.is_export:
            self._release(params, complete=outcome is Outcome.DONE)

    def _report(self, transfer: NodeTransfer, outcome: Outcome) -> None:
        name = transfer.params.name
        self._has_output = True
        self._output.stats[name] = transfer.stats
        self._totals["bytes"] += transfer.stats.num_bytes
        if not transfer.is_export and outcome is not Outcome.DONE:
            self._output.num_tokens_kept[name] = transfer.num_tokens_kept
        if outcome is Outcome.ABORTED:
            self._totals["aborts"] += 1
            self._output.aborted.append(name)
        elif outcome is Outcome.FAILED:
            self._totals["failures"] += 1
            self._output.failed[name] = transfer.failure or ("unknown", True)
            self._output.failure_codes[name] = transfer.failure_code
        elif transfer.is_export:
            self._output.released.append(name)
        else:
            self._output.finished_recving.append(name)
