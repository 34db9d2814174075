"""The connector contract: how an engine hands KV to, and takes KV from, another node.

Two halves, with vLLM's method names where the meaning is the same:

Scheduler half (one for each engine, in the engine core process)
    1. `get_num_new_matched_tokens`: how much of this prompt will come from elsewhere?
    2. `update_state_after_alloc`: blocks exist now; start pulling into them, or export them.
    3. `build_connector_meta`: called with every step; tells transfer processes what the step
       computes and returns what the workers must know.
    4. `get_finished`: events since the last call; `fileno` wakes the engine when there are any.
    5. `request_finished`: True while the blocks must stay: they are still being copied out.
    6. `abort`: stop a transfer; its blocks are free when it is reported aborted or failed.

Worker half (one for each rank, in the worker process)
    1. `register_kv_cache`: once, after allocation; the handle lets transfer processes map them.
    2. `start_load_kv`: before the forward pass of a step.
    3. `save_kv_layer`: after each layer of a step that computes KV for a peer.
    4. `wait_for_layer_load`: before each layer of a step that reads KV which is being loaded.

vLLM polls its workers for finished transfers. Here transfer processes report to the scheduler
half directly (`kv_transfer.metadata` says why), so the worker half has no `get_finished`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kv_transfer.layout import BlockIds, KVLayout
from kv_transfer.metadata import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVPeer,
    KVTransferParams,
)
from kv_transfer.tier import LoadTicket, Tier


class CudaCacheHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A cache in GPU memory: `num_bytes` from `offset` of the allocation that `ipc_handle` opens.

    `device_uuid`: 16 bytes that name the GPU in every process of the host.
    """

    device_uuid: bytes
    ipc_handle: bytes
    offset: int
    num_bytes: int


class KVCacheHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Lets another process of this host map one rank's KV cache: `num_blocks` blocks, as
    `kv_transfer.layout` says.

    Attributes:
        pid, fd: On CPU: the memory file `fd` of process `pid`. -1: none.
        cuda: On a GPU.
        marks_fd: Producer: memory file of process `pid` with the layers done (`layer_marks`).
        load_marks_fd: With a host tier: memory file of process `pid` with the layers that are
            loaded (`load_marks`). -1: steps never wait for layers.
    """

    rank: int
    pid: int
    fd: int = -1
    num_blocks: int
    cuda: CudaCacheHandle | None = None
    marks_fd: int = -1
    load_marks_fd: int = -1


class RequestLike(Protocol):
    """The part of a request that a connector reads."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def kv_transfer_params(self) -> KVTransferParams | None: ...


class ChunkLike(Protocol):
    """Tokens of one request that a step computes; `block_ids` of the whole prompt so far."""

    @property
    def request(self) -> RequestLike: ...
    @property
    def first_token(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_ids(self) -> BlockIds: ...


class HostTier(ABC):
    """Blocks of this node in host memory and on disk, by hash, as its scheduler sees them. Jobs
    copy them; calls return at once, and `KVConnectorOutput` says what has become of jobs."""

    capacity: int
    """Blocks that fit, at most."""
    has_disk: bool
    has_store: bool

    @property
    @abstractmethod
    def may_ask_store(self) -> bool:
        """Returns whether the store behind it can be asked now."""

    @abstractmethod
    def ask_store(self, names: Sequence[bytes], *, is_chain: bool = True) -> int:
        """Asks which of these blocks the store has. Returns the question's number
        (`KVConnectorOutput.store_found`). `is_chain`: those behind a gap do not count."""

    @abstractmethod
    def num_with_room(self, names: Sequence[bytes]) -> int:
        """Returns for how many of these blocks, from the first on, host memory has room, beside
        those of them that it has; 0 while that is not known (`is_ready`)."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Returns whether it is known which blocks are here."""

    @abstractmethod
    def __contains__(self, name: bytes) -> bool:
        """Returns whether a block is stored, or about to be."""

    @abstractmethod
    def tier_of(self, name: bytes) -> Tier | None:
        """Returns where the block lies; None: it is not here, or not yet."""

    @abstractmethod
    def num_found(self, names: Sequence[bytes], start: int) -> int:
        """Returns how many blocks from `names[start]` on can be loaded without a gap. All of
        `names` count as used."""

    @abstractmethod
    def store(self, named: Sequence[tuple[bytes, int]]) -> tuple[int, int] | None:
        """Begins to store the first of these (hash, block id), none of which is here, and no hash
        twice. Returns the job, and how many of them it is; None when all slots are in use now."""

    @abstractmethod
    def load(self, names: Sequence[bytes], blocks: list[int], behind: Tier = Tier.DISK) -> int:
        """Begins to copy blocks with these hashes, as many as `num_found` (or `num_with_room`) has
        said, to `blocks`; those that host memory lacks are read to slots first, from the disk or
        the store `behind`. Returns the job."""

    @abstractmethod
    def ticket(self, job: int) -> LoadTicket | None:
        """Returns what a step waits with for the layers of a load; None: it cannot."""

    @abstractmethod
    def release(self, job: int) -> None:
        """Lets a step go on that may wait for a load which has failed. Nothing may use its result
        any more."""

    @abstractmethod
    def give_up(self, job: int) -> bool:
        """Gives up a load of which nothing is copied yet, as its blocks are still read from disk.
        Returns False if there is none. Slots stay in use until they are read."""

    @abstractmethod
    def take_reads(self) -> list[tuple[int, float]]:
        """Returns the blocks and the seconds of each read from disk since the last call."""

    @abstractmethod
    def forget_all(self) -> None:
        """Forgets what is stored; jobs go on, but what they write does not count."""


class KVConnectorScheduler(ABC):
    """The half beside the scheduler. All methods return at once."""

    host_tier: HostTier | None = None
    """Blocks in host memory; None: there is no such tier."""
    check_interval_s: float = 1.0
    """How often `check_alive` wants to be called though nothing has happened."""

    @property
    @abstractmethod
    def peer_info(self) -> KVPeer | None:
        """Returns this node as peers must know it; endpoints are filled for producers. None: it
        exchanges no KV."""

    def refusal(self, request: RequestLike) -> str:
        """Returns why the request's KV parameters cannot be served; empty when they can."""
        return ""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> int:
        """Returns the number of tokens beyond `num_computed_tokens` whose KV will come from a peer;
        0 for none."""

    @abstractmethod
    def update_state_after_alloc(
        self, request: RequestLike, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Blocks for the request exist. Consumer: starts the pull. Producer: makes the export;
        `block_ids` are known there only of one whose KV exists already."""

    @abstractmethod
    def build_connector_meta(
        self, step_id: int, chunks: list[ChunkLike]
    ) -> KVConnectorMetadata | None:
        """Returns what workers must know of this step; None when that is nothing.

        `chunks`: its prompt chunks.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Becomes readable when `get_finished` has something to say."""

    @abstractmethod
    def get_finished(self) -> KVConnectorOutput | None:
        """Takes and merges the events that arrived. None when there were none."""

    @abstractmethod
    def request_finished(self, request: RequestLike) -> bool:
        """The request ended normally. True: keep its blocks until `finished_sending` (or failed
        or aborted) names its transfer."""

    @abstractmethod
    def abort(self, request: RequestLike) -> bool:
        """Calls the transfer off. True: keep the blocks until it is reported aborted or failed;
        False: nothing was in motion."""

    @abstractmethod
    def retry(
        self,
        request: RequestLike,
        params: KVTransferParams,
        block_ids: BlockIds,
        num_computed_tokens: int,
    ) -> None:
        """Makes a new attempt from another peer into the same blocks. Only after a failure."""

    def prompt_computed(self, request: RequestLike) -> None:  # noqa: B027
        """Consumer: the peer has computed the whole prompt. From now on a pull without progress
        has failed, whatever signs of life the peer gives."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Totals for metrics: bytes, transfers, failures, staged bytes, leases."""

    @property
    def process_pids(self) -> list[int]:
        """Returns the pids of the transfer processes that run now."""
        return []

    @abstractmethod
    def check_alive(self) -> None:
        """Restarts or reports transfer processes that died; their transfers fail."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all transfers and processes. Idempotent."""


class KVConnectorWorker(ABC):
    """The half inside a worker. Nothing here waits."""

    @abstractmethod
    def register_kv_cache(
        self, layout: KVLayout, memory: Any, current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        """Returns the handle by which transfer processes map the rank's cache.

        `memory`: one tensor that holds all slots as `layout` says. `current_stream`: on a GPU,
        the driver's handle of the stream on which the calling thread launches kernels.

        Raises:
            ValueError, DeviceError: Other processes cannot map it.
        """

    @abstractmethod
    def start_load_kv(self, step_id: int, metadata: KVConnectorMetadata) -> None:
        """A step begins."""

    @abstractmethod
    def save_kv_layer(self, layer: int) -> None:
        """The KV of `layer` is computed for all tokens of the step; on a GPU: everything that
        computes it is launched."""

    def wait_for_layer_load(self, ticket: LoadTicket, layer: int) -> None:
        """The step is about to read `layer`, whose KV comes from the host tier: on CPU this waits
        for it, on a GPU the stream does. A layer behind the last is never waited for."""
        raise NotImplementedError("this worker has no host tier")

    @abstractmethod
    def shutdown(self) -> None:
        """Closes sockets. Idempotent."""
