"""KV that goes out (prefill node): one export for each request that another node will pull.

1. `add`: the request arrived; a pull that comes before its first step finds the export
2. its chunks are announced with each step (`RemoteKV.build_meta`), and with the first one
   what a cached prefix has filled already
3. `request_ended`: usually before the peer has everything; the blocks are held
4. finished_sending: all KV is copied out of the blocks
5. `released`: the peer has it all. Or `failed`, or aborted, at any time.
"""

from __future__ import annotations

from engine.contracts.messages import KVTransferResult
from engine.contracts.request import Request
from engine.kv_cache.block import KVCacheBlock
from engine.sched.departures.held_blocks import HeldBlocks
from engine.sched.step_fence import StepFence
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVTransferParams, TransferName, TransferStats


def is_exported(request: Request) -> bool:
    """Returns whether a peer will pull the request's KV."""
    params = request.kv_transfer_params
    return params is not None and params.do_remote_decode


class Exports:
    """Keeps exports by transfer id, until the peer has released it. A new attempt replaces an older
    one, whose blocks are held as long as its own: nothing learns when readers of the older stop."""

    def __init__(self, connector: KVConnectorScheduler, fence: StepFence, held: HeldBlocks) -> None:
        self._connector = connector
        self._fence = fence
        self._held = held
        self._exports: dict[str, Request] = {}

    @property
    def count(self) -> int:
        """Returns the number of exports that peers have not released."""
        return len(self._exports)

    def add(self, request: Request) -> None:
        """Comes before the request is queued."""
        name = _params(request).name
        self._exports[name.transfer_id] = request
        self._held.pass_on(name)
        self._connector.update_state_after_alloc(request, (), 0)

    def request_ended(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        """Takes the request's blocks: free now, or when nothing reads them. Of one that was aborted
        or failed the KV is not complete, so its export is called off."""
        name = _params(request).name
        newest = self._exports.get(name.transfer_id)
        if newest is not None and newest is not request:
            # Readers for an older attempt were asked to stop before it learnt of the newest one.
            name, keeps = _params(newest).name, True
        elif not request.status.is_complete:
            keeps = newest is request and self._abort(name.transfer_id)
        else:
            keeps = self._connector.request_finished(request)
        if keeps:
            self._held.hold(name, blocks)
        else:
            self._fence.release(blocks)

    def abort_of(self, request_id: str) -> None:
        """Aborts the export of a request that ended before; its KV is not wanted any more."""
        for transfer_id, request in list(self._exports.items()):
            if request.request_id == request_id and not self._abort(transfer_id):
                self._held.release(_params(request).name)

    def _abort(self, transfer_id: str) -> bool:
        """Aborts and returns whether something may still read the blocks."""
        return self._connector.abort(self._exports.pop(transfer_id))

    def failed(
        self, name: TransferName, reason: str, retryable: bool, *, is_called_off: bool = False
    ) -> KVTransferResult | None:
        """Returns None when nothing waits for it."""
        request = self._take(name)
        if request is None:
            return None
        return KVTransferResult(
            request.request_id,
            name.attempt,
            False,
            reason=reason,
            retryable=retryable,
            is_called_off=is_called_off,
        )

    def released(self, name: TransferName, stats: TransferStats) -> KVTransferResult | None:
        request = self._take(name)
        if request is None:
            return None
        return KVTransferResult(request.request_id, name.attempt, True, stats)

    def _take(self, name: TransferName) -> Request | None:
        """Returns the request whose export this is, which has ended; None: it was replaced, or
        aborted."""
        request = self._exports.get(name.transfer_id)
        if request is None or _params(request).name != name:
            return None
        return self._exports.pop(name.transfer_id)

    def leftovers(self) -> list[str]:
        return [f"export {name}" for name in self._exports]


def _params(request: Request) -> KVTransferParams:
    assert request.kv_transfer_params is not None
    return request.kv_transfer_params
