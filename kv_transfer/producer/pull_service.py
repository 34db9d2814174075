"""Serves pullers in a producer's transfer process, over any transport of calls.

    Handshake   compares layouts, once for each pair of processes
    PullKV      1. waits for the export, if the pull is early (as long as a lease lasts)
                2. writes staged chunks of its stream as they come; heartbeats in between
                3. END, or the status says why not
    Release     the puller is done

PullKV has no response serializer: what goes out is staged memory, or the blocks themselves.
"""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import grpc

from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import CorruptChunk, HandshakeMismatch, KVTransferError, NotServed
from kv_transfer.metadata import KVPeer, is_transfer_id
from kv_transfer.producer.send_transfer import SendTransfer
from kv_transfer.producer.sender import KVSender
from kv_transfer.stages import ALL_LAYERS
from kv_transfer.state import LateMessage
from kv_transfer.transports.open_pull import OpenPull
from kv_transfer.wire.chunk import ChunkKind, mark
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from kv_transfer.wire.pull_spec import PullSpec
from kv_transfer.wire.service_paths import PULL_PATH, SERVICE
from tandem_pb import kv_transfer_pb2 as pb

_STATUS_OF = {
    LateMessage: grpc.StatusCode.ABORTED,
    CorruptChunk: grpc.StatusCode.DATA_LOSS,
    NotServed: grpc.StatusCode.UNIMPLEMENTED,
    HandshakeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
}


class PullService:
    """Serves what a `KVSender` has staged. `me` is this node as peers should see it."""

    def __init__(self, config: KVTransferConfig, me: KVPeer, sender: KVSender) -> None:
        self._me = me
        self._sender = sender
        self._chunk_bytes = config.chunk_bytes
        self._longest_wait_s = config.lease_s
        self._heartbeat_s = min(1.0, config.stall_timeout_s / 4)

    def methods(self) -> dict[str, RpcMethod]:
        """Returns methods by path."""
        return {
            f"/{SERVICE}/Handshake": RpcMethod(
                self.handshake, pb.KVPeer.FromString, pb.KVPeer.SerializeToString
            ),
            f"/{SERVICE}/Release": RpcMethod(
                self.release, pb.ReleaseRequest.FromString, pb.ReleaseReply.SerializeToString
            ),
            PULL_PATH: RpcMethod(self.pull_kv, pb.PullRequest.FromString),
        }

    async def handshake(self, request: pb.KVPeer, call: ServerCall) -> pb.KVPeer:
        try:
            self._me.layout.check_compatible(peer_from_proto(request).layout)
        except HandshakeMismatch as error:
            await _refuse(call, error)
        reply = peer_to_proto(self._me)
        for name, data in self._sender.advertise(request.host_id).items():
            reply.transports.append(pb.Transport(id=name, data=data))
        return reply

    async def release(self, request: pb.ReleaseRequest, call: ServerCall) -> pb.ReleaseReply:
        await self._check_name(request.transfer_id, request.epoch, call)
        known = self._sender.release(request.transfer_id, request.attempt, request.complete)
        return pb.ReleaseReply(known=known)

    async def pull_kv(self, request: pb.PullRequest, call: ServerCall) -> None:
        await self._check_name(request.transfer_id, request.epoch, call)
        try:
            transfer = await self._exported(request, call)
            pull = self._open(transfer, request)
        except KVTransferError as error:
            await _refuse(call, error)
        try:
            await self._write_stream(transfer, pull, call)
        except KVTransferError as error:
            await _refuse(call, error)
        finally:
            self._sender.close_pull(transfer, pull)

    async def _exported(self, request: pb.PullRequest, call: ServerCall) -> SendTransfer:
        """Waits for a transfer that is not exported yet, a bounded time. A wait in which we were
        held up ourselves does not count: the export may be in its socket, unread."""
        left_s = self._longest_wait_s
        name = request.transfer_id, request.attempt
        with self._sender.early_pulls.waiting(request.transfer_id) as exported:
            while (transfer := self._sender.find(*name)) is None:
                if left_s <= 0:
                    await call.abort(
                        grpc.StatusCode.NOT_FOUND,
                        f"transfer {name[0]} attempt {name[1]} was not exported within "
                        f"{self._longest_wait_s:g} s",
                    )
                exported.clear()
                waits_since = time.monotonic()
                await self._wait(exported, *name, call)
                waited_s = time.monotonic() - waits_since
                if waited_s < 2 * self._heartbeat_s:
                    left_s -= waited_s
        return transfer

    def _open(self, transfer: SendTransfer, request: pb.PullRequest) -> OpenPull:
        spec = PullSpec(
            rank=request.rank,
            tp_size=request.tp_size,
            stream=request.stream_index,
            num_streams=request.num_streams,
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            repeat=frozenset(request.repeat_chunks),
            transport=request.transport,
            layers=range(request.first_layer, request.stop_layer or ALL_LAYERS.stop),
        )
        return self._sender.open_pull(transfer, spec)

    async def _write_stream(self, transfer: SendTransfer, pull: OpenPull, call: ServerCall) -> None:
        while True:
            pull.wake.clear()
            while message := pull.next_message():
                await self._write(pull, call, message)
                if transfer.end_reason:
                    break
            if transfer.end_reason:
                raise LateMessage(f"transfer {transfer.transfer_id}: {transfer.end_reason}")
            if pull.is_complete:
                break
            await self._wait(pull.wake, transfer.transfer_id, transfer.attempt, call)
        await self._mark(ChunkKind.END, transfer.transfer_id, transfer.attempt, call)

    async def _write(self, pull: OpenPull, call: ServerCall, message: OutMessage) -> None:
        pull.writes_since = time.monotonic()
        call.bytes_to_come = pull.bytes_left
        try:
            await call.write(message)
        finally:
            pull.writes_since = None

    async def _mark(
        self, kind: ChunkKind, transfer_id: str, attempt: int, call: ServerCall
    ) -> None:
        await call.write(OutMessage([mark(kind, transfer_id, attempt, self._chunk_bytes)]))

    async def _wait(
        self, event: asyncio.Event, transfer_id: str, attempt: int, call: ServerCall
    ) -> None:
        """Waits for the event, or one heartbeat: then the puller learns that we live."""
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await event.wait()
        except TimeoutError:
            await self._mark(ChunkKind.HEARTBEAT, transfer_id, attempt, call)

    async def _check_name(self, transfer_id: str, epoch: int, call: ServerCall) -> None:
        if not is_transfer_id(transfer_id):
            await call.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a transfer id is 32 lower-case hex digits"
            )
        if epoch != self._me.epoch:
            await call.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this node has restarted (its epoch changed); repeat the handshake",
            )


async def _refuse(call: ServerCall, error: KVTransferError) -> NoReturn:
    await call.abort(_STATUS_OF.get(type(error), grpc.StatusCode.INVALID_ARGUMENT), str(error))
