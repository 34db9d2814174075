"""Consumer: pulls KV into blocks of this rank.

    1. RecvMeta    layouts are compared, a handshake with the peer's processes (once), streams open,
                   each over the first transport that both ends have
    2. FIRST_BYTE  the first KV has been written
    3. the end     RECEIVED when every stream is complete; FAILED for the first error, or silence,
                   or signs of life without KV once the prompt is computed;
                   ABORTED on AbortMeta. Reported to `kv_transfer.control.scheduler` when no stream
                   is left that could write, with how much of the prompt is complete

What is received into blocks or staging memory may be written by threads, but a stream has not ended
before they are done, and all copies are issued on the event loop: a cancelled stream writes nothing
more. A chunk counts as arrived on the event loop alone, after its checksum.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

from edge.security.config import Role
from edge.security.credentials import Credentials
from edge.standstill import sleep_and_see
from kv_transfer.config import KVTransferConfig
from kv_transfer.consumer.joint_tasks import all_or_none
from kv_transfer.consumer.path_meter import PathMeter
from kv_transfer.consumer.peer_client import PeerClient
from kv_transfer.consumer.recv_transfer import RecvTransfer
from kv_transfer.consumer.stream_plan import PlannedStreams, plan_streams
from kv_transfer.errors import (
    KV_TRANSFER,
    KVTransferError,
    NotServed,
    PeerLost,
    TransferTimeout,
)
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import (
    AbortMeta,
    ComputedMeta,
    KVPeer,
    RecvMeta,
    ReleaseMeta,
    TransferEvent,
    TransferEventKind,
)
from kv_transfer.state import KVTransferState, LateMessage, TransferTable
from kv_transfer.transports.base import ConsumerTransport, TransportId
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.pull_stream import PullStream
from kv_transfer.transports.registry import consumer_transports
from kv_transfer.transports.stream.ends import new_pull_client
from kv_transfer.wire.channels import slot_of
from kv_transfer.wire.handshake import check_endpoints
from kv_transfer.wire.pull_client import PullClient

_FEWEST_BYTES = 1 << 20
"""How long less takes says nothing about a rate."""
_IDLE_S = 600.0
"""Connections that were not used for this long are closed; longer than a transfer can take."""

logger = logging.getLogger(__name__)

_EVENT_OF = {
    KVTransferState.DONE: TransferEventKind.RECEIVED,
    KVTransferState.FAILED: TransferEventKind.FAILED,
    KVTransferState.ABORTED: TransferEventKind.ABORTED,
}


@dataclass(frozen=True, slots=True)
class _OpenStream:
    """A stream, the plan that it is of, and the transports that are tried if its own is refused."""

    stream: PullStream
    planned: PlannedStreams
    others: Sequence[ConsumerTransport]


class _Ending(NamedTuple):
    """How a transfer ended, why, and whether another attempt may succeed; `code`: its kind."""

    state: KVTransferState
    reason: str = ""
    retryable: bool = True
    code: str = KV_TRANSFER


class KVReceiver:
    """One transfer process of one rank. `emit` takes events for the scheduler half."""

    def __init__(
        self,
        config: KVTransferConfig,
        me: KVPeer,
        rank: int,
        index: int,
        cache: KVCacheView,
        emit: Callable[[TransferEvent], None],
        on_change: Callable[[], None],
        source: str = "",
    ) -> None:
        """Pulls from our address `source`, where the transport can say so."""
        self._config = config
        self._me = me
        self._rank = rank
        self._index = index
        self._process = rank * config.num_processes + index
        self._cache = cache
        self._emit_event = emit
        self._on_change = on_change
        credentials = self._credentials = Credentials(config.security)
        self._peers = PeerClient(me, config.stall_timeout_s, credentials)
        self._client = new_pull_client(config, credentials, source)
        self._transports = consumer_transports(config, cache)
        self._transfers: TransferTable[RecvTransfer] = TransferTable()
        self._releases: set[asyncio.Task[None]] = set()
        self._paths: WeakValueDictionary[str, PathMeter] = WeakValueDictionary()
        """Keeps one for each peer, while any transfer from it lives."""
        self.received: Counter[str] = Counter()
        """Bytes of KV, by the transport that brought them."""
        self.corrupt_chunks = 0

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def num_pulls(self) -> int:
        return sum(transfer.num_open_streams for transfer in self._transfers)

    # What the scheduler says ------------------------------------------------------------------

    def receive(self, meta: RecvMeta) -> None:
        path = self._paths.setdefault(meta.peer.engine_id, PathMeter())
        transfer = RecvTransfer(meta, path)
        self._note_role(meta.peer)
        with suppress(LateMessage):
            self._transfers.open(meta.transfer_id, meta.attempt, transfer)
            transfer.task = asyncio.create_task(self._run(transfer))
            self._on_change()

    def abort(self, meta: AbortMeta) -> None:
        transfer = self._transfers.find(meta.transfer_id, meta.attempt)
        if transfer is not None and transfer.abort_requested:
            return
        if transfer is not None and transfer.task is not None:
            transfer.abort_requested = True
            if not transfer.is_over:  # Else it says so once its copies are done.
                transfer.task.cancel()
            if not transfer.has_begun:
                # A task that is cancelled before its first step never takes it.
                self._end(transfer, _Ending(KVTransferState.ABORTED))
        elif not self._transfers.is_late(meta.transfer_id, meta.attempt):
            self._transfers.refuse(meta.transfer_id, meta.attempt)
            self._emit_event(
                TransferEvent(
                    TransferEventKind.ABORTED, meta.transfer_id, meta.attempt, self._process
                )
            )

    def prompt_computed(self, meta: ComputedMeta) -> None:
        transfer = self._transfers.find(meta.transfer_id, meta.attempt)
        if transfer is not None:
            transfer.prompt_is_computed()

    def release(self, meta: ReleaseMeta) -> None:
        self._note_role(meta.peer)
        for rank in meta.peer.endpoints:
            for address in rank:
                task = asyncio.create_task(self._peers.release(address, meta))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)

    def _note_role(self, peer: KVPeer) -> None:
        for address in (one for rank in peer.endpoints for one in rank if peer.is_decode):
            self._credentials.note_role(address, Role.DECODE)

    async def run(self) -> None:
        """Keeps house until cancelled."""
        while True:
            await asyncio.sleep(_IDLE_S / 10)
            await self._peers.close_idle(_IDLE_S)
            await self._client.close_idle(_IDLE_S)
            for transport in self._transports:
                transport.close_idle(_IDLE_S)

    async def close(self) -> None:
        """Ends all transfers without a word: the node is going."""
        tasks = [transfer.task for transfer in self._transfers if transfer.task is not None]
        for task in [*tasks, *self._releases]:
            task.cancel()
        await asyncio.gather(*tasks, *self._releases, return_exceptions=True)
        await self._client.close()
        await self._peers.close()
        await self._cache.copies.settled()
        for transport in self._transports:
            transport.close()

    # One transfer -----------------------------------------------------------------------------

    async def _run(self, transfer: RecvTransfer) -> None:
        transfer.has_begun = True
        ending = await self._outcome(transfer)
        # Copies into our blocks may be on their way; until they are done, nothing may have them.
        await self._cache.copies.settled()
        is_done = ending.state is KVTransferState.DONE
        num_tokens_kept = transfer.meta.num_tokens if is_done else transfer.num_tokens_complete
        transfer.close_streams()
        self._end(transfer, ending, num_tokens_kept)

    async def _outcome(self, transfer: RecvTransfer) -> _Ending:
        meta = transfer.meta
        try:
            try:
                self._transfers.activate(meta.transfer_id, meta.attempt)
                await self._pull(transfer)
            finally:
                transfer.is_over = True
        except asyncio.CancelledError:
            if transfer.abort_requested:
                return _Ending(KVTransferState.ABORTED)
            return _Ending(KVTransferState.FAILED, "the connection was given up")
        except KVTransferError as error:
            if isinstance(error, PeerLost | TransferTimeout):
                await self._forget_peer(transfer)
            return _Ending(KVTransferState.FAILED, str(error), error.retryable, error.kind)
        except Exception as error:
            logger.exception("transfer %s failed unexpectedly", meta.transfer_id)
            return _Ending(KVTransferState.FAILED, repr(error))
        return _Ending(KVTransferState.DONE)

    async def _pull(self, transfer: RecvTransfer) -> None:
        meta = transfer.meta
        try:
            self._cache.check_blocks(meta.block_ids, meta.first_token, meta.num_tokens)
        except ValueError as error:
            raise KVTransferError(str(error)) from error
        self._me.layout.check_compatible(meta.peer.layout)
        check_endpoints(meta.peer)
        plan = plan_streams(meta, self._config, self._me.layout, self._rank, self._index)
        transfer.num_planned = len(plan)
        await self._handshake(meta.peer, {planned.address for planned in plan})
        opened = [one for each in plan for one in self._open(transfer, each, self._transports)]
        transfer.is_planned = True
        self._on_change()
        transfer.extend_silence_deadline()
        await all_or_none([self._complete(transfer, one) for one in opened], self._watch(transfer))
        took_s = transfer.has_received()
        await self._cache.copies.settled()
        transfer.last_byte_at = time.monotonic()
        for stream in transfer.streams:
            stream.check()
        self._note_rate(transfer, took_s)

    def _note_rate(self, transfer: RecvTransfer, took_s: float) -> None:
        """Lets transports know how fast KV came over the stream, if all of it did."""
        is_streamed = {stream.transport for stream in transfer.streams} == {TransportId.STREAM}
        if is_streamed and transfer.num_bytes >= _FEWEST_BYTES and took_s > 0:
            for transport in self._transports:
                transport.note_stream(transfer.meta.peer, transfer.num_bytes / took_s)

    async def _handshake(self, peer: KVPeer, addresses: set[str]) -> None:
        new = [address for address in addresses if not self._peers.knows(peer, address)]
        if new:
            await all_or_none([self._peers.handshake(peer, address) for address in new])

    def _open(
        self,
        transfer: RecvTransfer,
        planned: PlannedStreams,
        choices: Sequence[ConsumerTransport],
    ) -> list[_OpenStream]:
        """Opens streams over the first of `choices` that works with the peer. Raises `NotServed`
        when there is none."""
        said = self._peers.transports_of(planned.job.meta.peer, planned.address)
        for number, transport in enumerate(choices):
            if transport.id not in said:
                continue
            jobs = [planned.job] if transport.is_one_stream_enough else planned.cut()
            ways = [transport.fetch(job, said[transport.id]) for job in jobs]
            assemblers = [way for way in ways if way is not None]
            client = transport.caller(said[transport.id], self._client)
            streams = [self._stream(transfer, planned, way, client) for way in assemblers]
            transfer.streams += streams
            if len(assemblers) == len(jobs):
                others = choices[number + 1 :]
                return [_OpenStream(stream, planned, others) for stream in streams]
            transfer.replace(streams)
        raise NotServed(f"{planned.address} serves none of the transports that we know")

    async def _complete(self, transfer: RecvTransfer, opened: _OpenStream) -> None:
        """Runs a stream; what the peer cannot serve that way now comes over another transport."""
        try:
            await opened.stream.run()
        except NotServed:
            if not opened.others:
                raise
            planned = opened.planned.only(opened.stream.job)
            again = self._open(transfer, planned, opened.others)
            # Not before: what it should have brought is missing as long as nothing else brings it.
            transfer.replace([opened.stream])
            await all_or_none([self._complete(transfer, one) for one in again])

    def _stream(
        self,
        transfer: RecvTransfer,
        planned: PlannedStreams,
        assembler: ChunkAssembler,
        client: PullClient,
    ) -> PullStream:
        transport = TransportId(assembler.transport).name.lower()
        return PullStream(
            assembler,
            client,
            planned.address,
            slot_of(assembler.job.stream, planned.num_addresses),
            lambda num_bytes: self._count(transfer, transport, num_bytes),
            self._refused,
        )

    async def _watch(self, transfer: RecvTransfer) -> None:
        """Raises when one of the streams has gone silent, or none brings KV though the prompt is
        computed. When we were held up ourselves, what they said meanwhile is not read yet: that is
        no silence."""
        limit_s = self._config.stall_timeout_s
        while True:
            if await sleep_and_see(limit_s / 10) > limit_s / 8:
                transfer.extend_silence_deadline()
            silent = transfer.silent_streams(limit_s)
            if silent:
                raise TransferTimeout(f"{silent[0].address} said nothing for {limit_s:g} s")
            if transfer.has_stalled(limit_s):
                raise TransferTimeout(
                    f"{transfer.meta.peer.engine_id} has computed the prompt, and sent no KV for "
                    f"{limit_s:g} s"
                )

    def _count(self, transfer: RecvTransfer, transport: str, num_bytes: int) -> None:
        self.received[transport] += num_bytes
        self._on_change()
        if transfer.count(num_bytes):
            self._emit(TransferEventKind.FIRST_BYTE, transfer, _Ending(KVTransferState.ACTIVE))

    def _refused(self) -> None:
        self.corrupt_chunks += 1
        self._on_change()

    def _end(self, transfer: RecvTransfer, ending: _Ending, num_tokens_kept: int = 0) -> None:
        meta = transfer.meta
        self._transfers.end(meta.transfer_id, meta.attempt, ending.state)
        self._emit(_EVENT_OF[ending.state], transfer, ending, num_tokens_kept)
        transfer.release()
        self._on_change()

    def _emit(
        self,
        kind: TransferEventKind,
        transfer: RecvTransfer,
        ending: _Ending,
        num_tokens_kept: int = 0,
    ) -> None:
        self._emit_event(
            TransferEvent(
                kind,
                transfer.meta.transfer_id,
                transfer.meta.attempt,
                self._process,
                transfer.stats,
                ending.reason,
                ending.retryable,
                num_tokens_kept=num_tokens_kept,
                code=ending.code,
            )
        )

    async def _forget_peer(self, lost: RecvTransfer) -> None:
        """Addresses that other transfers are reading from are left to them."""
        busy = {
            stream.address
            for transfer in self._transfers
            if transfer is not lost
            for stream in transfer.streams
        }
        addresses = {address for rank in lost.meta.peer.endpoints for address in rank}
        self._peers.forget(addresses - busy)
        await self._client.forget(addresses - busy)
