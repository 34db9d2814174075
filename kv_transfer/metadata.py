"""Messages of the scheduler, the workers and the transfer processes of one node about KV.

Four directions, all msgspec, none with tensors:

    node server ──KVTransferParams──▶ scheduler      this request's KV goes out / comes in
    scheduler ──TransferCommand──▶ transfer process  over ZeroMQ, at once
    worker ──StepProgress──▶ transfer process        over ZeroMQ, as layers finish (producer only)
    transfer process ──TransferEvent──▶ scheduler    over ZeroMQ, at once

Commands and events do not pass through the workers: block ids are the same on every rank, so the
scheduler addresses transfer processes itself, and an event wakes up an idle engine.
"""

from __future__ import annotations

import re
from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec

from kv_transfer.errors import KV_TRANSFER
from kv_transfer.layer_times import LayerTime
from kv_transfer.layout import BlockIds, KVLayout
from kv_transfer.tier import LoadTicket, TierCommand, TierEvent

_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


class KVPeer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node as seen from the data plane. `endpoints[rank]` are host:port strings. `is_decode`: it
    is a decode node, whose certificate says so. `groups`: further data-parallel groups of the same
    node, whose blocks are their own. `names_group`: it says which of them computes a prompt."""

    engine_id: str
    epoch: int
    layout: KVLayout
    endpoints: tuple[tuple[str, ...], ...] = ()
    is_decode: bool = False
    groups: tuple[KVPeer, ...] = ()
    names_group: bool = False

    def of(self, transfer_id: str) -> KVPeer:
        """Returns the group that holds the KV of a transfer whose group nothing named."""
        return self.group(group_of_transfer(transfer_id, 1 + len(self.groups)))

    def group(self, index: int) -> KVPeer:
        """Returns one of the groups, alone. Raises IndexError."""
        if not self.groups and index == 0:
            return self
        alone = msgspec.structs.replace(self, groups=(), names_group=False)
        return (alone, *self.groups)[index]


class TransferName(NamedTuple):
    """Names one attempt of a transfer: what is said of one attempt is never true of the next."""

    transfer_id: str
    attempt: int


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The P/D part of one request.

    Attributes:
        do_remote_prefill: On decode: KV of the prompt comes from `peer`. do_remote_decode: On
            prefill: KV of the prompt is exported to the node that pulls `transfer_id`. transfer_id:
            32 hex digits, random for each request. attempt: Grows with every new attempt of the
            same request. peer: The prefill node (on decode only). first_token_only: The peer's
            first token is the whole answer: nothing is pulled (on decode
            only). is_prefix: The peer holds whole blocks, of windows too: these are taken whole.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    transfer_id: str
    attempt: int = 0
    peer: KVPeer | None = None
    first_token_only: bool = False
    is_prefix: bool = False

    @property
    def name(self) -> TransferName:
        return TransferName(self.transfer_id, self.attempt)


class SendMeta(msgspec.Struct, frozen=True, tag="send", array_like=True):
    """Producer: tokens [first_token, first_token + num_tokens) are computed in step `step_id`.

    `block_ids` are the physical blocks of the whole prompt known so far. `step_id` -1: computed
    already (a cached prefix), every layer may be read at once.
    """

    transfer_id: str
    attempt: int
    step_id: int
    first_token: int
    num_tokens: int
    block_ids: BlockIds


class ExportMeta(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """Producer: a transfer will come; pulls for it may wait. Starts the lease."""

    transfer_id: str
    attempt: int
    num_tokens: int


class RecvMeta(msgspec.Struct, frozen=True, tag="recv", array_like=True):
    """Consumer: pull tokens [first_token, num_tokens) into `block_ids`. `is_prefix`: of windows all
    that the first block has."""

    transfer_id: str
    attempt: int
    peer: KVPeer
    block_ids: BlockIds
    first_token: int
    num_tokens: int
    is_prefix: bool = False


class AbortMeta(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Either side: stop. Answered by an ABORTED event once no writer is left.

    `is_export`: it is KV that goes out; where a process moves KV both ways, its sender is meant.
    """

    transfer_id: str
    attempt: int
    is_export: bool = False


class ComputedMeta(msgspec.Struct, frozen=True, tag="computed", array_like=True):
    """Consumer: the peer has computed the whole prompt, so its KV must come without a pause."""

    transfer_id: str
    attempt: int


class ReleaseMeta(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """Consumer: tell the peer that its staged KV of this attempt is not needed any more.

    `complete`: all of it has arrived; else the puller gives up. Not answered by an event.
    """

    transfer_id: str
    attempt: int
    peer: KVPeer
    complete: bool


TransferCommand = (
    SendMeta | ExportMeta | RecvMeta | ComputedMeta | AbortMeta | ReleaseMeta | TierCommand
)


class StepProgress(msgspec.Struct, frozen=True, array_like=True):
    """Producer's worker: layers [0, num_layers_done) of step `step_id` are in the KV cache."""

    step_id: int
    num_layers_done: int


class TransferEventKind(IntEnum):
    """A transfer process reports these. All but FIRST_BYTE are terminal for that process's share.

    STAGED: producer has copied all KV out of the blocks; they may be freed.
    RELEASED: producer: the puller acknowledged, staged memory is free.
    RECEIVED: consumer has written all of its share into the blocks.
    ABORTED: it was called off, by this node or (producer) by the puller.
    """

    FIRST_BYTE = 0
    STAGED = 1
    RELEASED = 2
    RECEIVED = 3
    FAILED = 4
    ABORTED = 5


class Reclaim(StrEnum):
    """Why a producer's memory of a transfer became free.

    RELEASED: the puller has it all. GIVEN_UP: the puller wants it no more. ABORTED: called off by
    this node. LEASE_ENDED: nothing pulled for too long. ERROR: it could not go on.
    """

    RELEASED = "released"
    GIVEN_UP = "given_up"
    ABORTED = "aborted"
    LEASE_ENDED = "lease_ended"
    ERROR = "error"


class TransferStats(msgspec.Struct, frozen=True, array_like=True):
    """Measured by one transfer process for one transfer. Times: CLOCK_MONOTONIC seconds.

    Attributes:
        first_byte_at, last_byte_at: Consumer: in the blocks.
        received_at: Consumer: the last byte had come, but may not have been in its block.
        layers: Producer: of each layer, when it was computed and when it had left the blocks.
        path_bytes_per_s: Consumer: of all transfers from the peer meanwhile; 0: that is not known.
        path_was_full: Consumer: only the path held it up, so that is all that the path gives.
    """

    num_bytes: int = 0
    num_streams: int = 0
    first_byte_at: float = 0.0
    last_byte_at: float = 0.0
    received_at: float = 0.0
    layers: tuple[LayerTime, ...] = ()
    path_bytes_per_s: float = 0.0
    path_was_full: bool = False


class TransferEvent(msgspec.Struct, frozen=True, tag="event", array_like=True):
    """
    Attributes:
        process: Counted over ranks and processes: rank * num_processes + index.
        sent_at: On the sender's clock, when it is on another host than the engine core.
        num_tokens_kept: Consumer, at the end: leading tokens of the prompt of which this process's
            share is complete, however it ended.
        code: Of a failure: the kind of its `KVTransferError`.
    """

    kind: TransferEventKind
    transfer_id: str
    attempt: int
    process: int
    stats: TransferStats = TransferStats()
    reason: str = ""
    retryable: bool = True
    sent_at: float | None = None
    num_tokens_kept: int = 0
    code: str = KV_TRANSFER


class ProcessReport(msgspec.Struct, frozen=True, tag="report", array_like=True):
    """A transfer process about itself: once when it is ready, then after changes.

    Attributes:
        process: As in `TransferEvent`.
        generation: Of the process; a restarted one has a higher one.
        address: host:port that it listens on; empty on consumers.
        staged_bytes: Host memory that holds staged KV now.
        leases: Exports and staged KV waiting for a puller now.
        num_transfers: Transfers in motion now.
        num_pulls: PullKV calls open now, served or made.
        bytes_moved: Payload sent (producer) or received (consumer) since it started.
        corrupt_chunks: Chunks refused since it started.
        leases_expired: Since it started.
        reclaimed: Transfers that have ended since it started, by `Reclaim`.
        commands_address: Where it listens for commands when the engine core is on another host.
        dropped_messages: On its sockets, since it started, that are none of this engine's.
        plaintext_connections: Accepted without TLS where there is TLS, since it started.
        received: Payload received since it started, by transport.
    """

    process: int
    generation: int = 0
    address: str = ""
    staged_bytes: int = 0
    leases: int = 0
    num_transfers: int = 0
    num_pulls: int = 0
    bytes_moved: int = 0
    corrupt_chunks: int = 0
    leases_expired: int = 0
    reclaimed: dict[str, int] = {}
    commands_address: str = ""
    dropped_messages: int = 0
    plaintext_connections: int = 0
    received: dict[str, int] = {}


class ProcessFault(msgspec.Struct, frozen=True, tag="fault", array_like=True):
    """A transfer process ends, and this is why.

    Attributes:
        process: As in `TransferEvent`.
        generation: Of the process.
        reason: For operators.
    """

    process: int
    generation: int
    reason: str


ProcessEvent = TransferEvent | TierEvent
ProcessMessage = ProcessEvent | ProcessReport | ProcessFault


class KVConnectorMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Rides on `SchedulerOutput.kv` to the workers.

    `save_kv`: this step computes KV that a peer waits for, so report layers as they finish.
    `load`: this step reads KV that is being loaded, so wait for each layer.
    """

    save_kv: bool = False
    load: LoadTicket | None = None


class KVConnectorOutput(msgspec.Struct, kw_only=True):
    """Events merged over all processes and ranks, by transfer and attempt.

    finished_sending: producer's blocks are copied out everywhere.
    finished_recving: consumer's blocks are complete on every rank.
    failed: attempt to (reason, retryable); no writer is left. `failure_codes`: their codes.
    num_tokens_kept: of pulls that failed or were aborted: leading tokens of the prompt whose KV is
        complete, every layer on every rank.
    aborted: no writer is left.
    released: producer's staged memory is free everywhere.
    stats: for each finished transfer, summed bytes and streams, earliest and latest byte.
    host_jobs: of the host tier, by job that is done everywhere: whether all of it is right.
    host_begun: loads of the host tier whose first layers are there.
    store_found: questions to the store, by job: which of the blocks are there, by their places.
    """

    finished_sending: list[TransferName] = []
    finished_recving: list[TransferName] = []
    failed: dict[TransferName, tuple[str, bool]] = {}
    failure_codes: dict[TransferName, str] = {}
    num_tokens_kept: dict[TransferName, int] = {}
    aborted: list[TransferName] = []
    released: list[TransferName] = []
    stats: dict[TransferName, TransferStats] = {}
    host_jobs: dict[int, bool] = {}
    host_begun: list[int] = []
    store_found: dict[int, list[int]] = {}


def is_transfer_id(text: str) -> bool:
    """Returns whether `text` can name a transfer: 32 lower-case hex digits, which the decode node
    draws for each request."""
    return _TRANSFER_ID.fullmatch(text) is not None


def group_of_transfer(transfer_id: str, num_groups: int) -> int:
    """Returns the group of a transfer where one side is of a release that cannot tell the other."""
    return int(transfer_id[:8], 16) % num_groups if num_groups > 1 else 0
