"""The seam between the data plane and what moves KV.

    producer                                     consumer
    ProducerTransport  one for a process         ConsumerTransport
        advertise ──── with the handshake ──────▶    fetch: can this peer's KV come this way?
        open                                         │
          ▼                                          ▼
    ProducerTransfer   one for an export         ChunkAssembler   one for a stream
        ready, blocks_are_free                       accept, check, num_tokens_complete
        open_pull                                    ▲
          ▼                                          │
        OpenPull ───── messages of a PullKV call ──▶ PullStream

`KVSender` and `KVReceiver` keep the table of transfers, leases, readiness and the watch for
silence. A PullKV call is how the two sides of every transport talk: its messages carry KV itself,
or say where it lies. So a transport that reads the peer's memory needs no calls of its own; it may
carry them its own way (`listen`, `caller`), where that is quicker than the network.

A pull names its transport. A producer that cannot serve it that way (any more) refuses with
`NotServed`, and the stream goes on with the consumer's next choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum

from edge.h2.rpc_method import RpcMethod
from kv_transfer.layer_times import LayerTimes
from kv_transfer.layout import BlockIds, KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import ExportMeta, KVPeer
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.open_pull import OpenPull, PullTerms
from kv_transfer.wire.chunk_grid import ChunkGrid, ChunkPlace
from kv_transfer.wire.pull_client import PullClient


class TransportId(IntEnum):
    """As the wire names transports."""

    STREAM = 0
    CUDA_IPC = 1
    NIXL = 2


class Export:
    """One prompt's KV that goes out, as the transports of one transfer process see it.

    Attributes:
        grid: Its chunks. Blocks that the puller holds already leave it when the first pull comes.
        share: (number of this process, processes of its rank).
        is_staged: The engine knows that the blocks are free.
        keeps_blocks: Something reads blocks where they lie, or may want copies of them once more,
            until the export has ended.
        end_reason: Not empty once it has ended: pulls stop with it.
    """

    def __init__(
        self, meta: ExportMeta, layout: KVLayout, chunk_bytes: int, share: tuple[int, int]
    ) -> None:
        self.transfer_id = meta.transfer_id
        self.attempt = meta.attempt
        self.num_tokens = meta.num_tokens
        self.grid = ChunkGrid.of(layout, chunk_bytes, 0, meta.num_tokens)
        self.share = share
        self.block_ids: BlockIds = ()
        self.pulls: set[OpenPull] = set()
        """Open now, over any transport."""
        self.is_staged = False
        self.keeps_blocks = False
        self.end_reason = ""
        self.layer_times = LayerTimes(layout.num_layers)
        self._layout = layout

    def own_chunks(self) -> Iterator[int]:
        """Yields the chunks of this process's share that anything wants."""
        return self.grid.stripe(*self.share)

    def blocks_of(self, place: ChunkPlace) -> list[int]:
        """Returns the physical blocks of a ready chunk."""
        blocks = self.grid.blocks_of(place)
        return self.block_ids[place.group][blocks.start : blocks.stop]

    def saved(self, place: ChunkPlace) -> None:
        """The chunk has left the blocks, or a puller knows where it lies."""
        self.layer_times.saved(self._layout.groups[place.group].layers[place.layer])


class ExportOwner(ABC):
    """Keeps the exports, and is notified of them by transports."""

    @abstractmethod
    def was_sent(self, export: Export, num_bytes: int) -> None:
        """A message with this many bytes of payload has left."""

    @abstractmethod
    def left_blocks(self, export: Export) -> None:
        """`blocks_are_free` may have changed."""

    @abstractmethod
    def fail(self, export: Export, reason: str) -> None:
        """The export can never be served."""

    @abstractmethod
    def changed(self) -> None:
        """Something that is reported has changed."""


class ProducerTransfer(ABC):
    """One export over one transport."""

    @property
    @abstractmethod
    def blocks_are_free(self) -> bool:
        """Returns whether this transport can do without the export's blocks from now on."""

    @abstractmethod
    def ready(self, indices: Sequence[int]) -> None:
        """These chunks of the export's grid are computed."""

    @abstractmethod
    def narrow(self) -> None:
        """A puller has come, and the export's grid lost what it holds already."""

    @abstractmethod
    def open_pull(self, terms: PullTerms) -> OpenPull:
        """Raises KVTransferError; `NotServed` if another transport may do it."""

    @abstractmethod
    def close_pull(self, pull: OpenPull) -> None:
        """Its call has ended."""

    @abstractmethod
    def end(self, then: Callable[[], None]) -> None:
        """The export has ended. Calls `then` when no thread reads its blocks any more."""


class ProducerTransport(ABC):
    """One transport of one transfer process."""

    id: TransportId

    @abstractmethod
    def advertise(self, puller_host: str) -> bytes | None:
        """Returns what a puller with this `host_id` must know; None: it cannot use us."""

    @property
    def staged_bytes(self) -> int:
        """Returns the host memory that holds copies of KV now."""
        return 0

    @abstractmethod
    def open(self, export: Export) -> ProducerTransfer:
        """An export begins."""

    async def listen(self, methods: Mapping[str, RpcMethod]) -> None:
        """Serves `methods`, by path, to pullers that call in a way of this transport's own, if it
        has one, until `close`. Pullers may call over the network all the same."""
        return

    async def close(self) -> None:
        """Calls in motion that it carries are cancelled."""
        return

    async def run(self) -> None:
        """Works until cancelled; most transports have nothing to do beside their calls."""
        return


class ConsumerTransport(ABC):
    """One transport of one transfer process, which writes into `cache`."""

    id: TransportId
    is_one_stream_enough = False
    """Several streams between two processes gain nothing."""

    def __init__(self, cache: KVCacheView) -> None:
        self._cache = cache

    def caller(self, advertised: bytes, network: PullClient) -> PullClient:
        """Returns what carries the calls to a peer that said this of the transport; `network` can
        call every peer."""
        return network

    @abstractmethod
    def fetch(self, job: FetchJob, advertised: bytes) -> ChunkAssembler | None:
        """Returns where the chunks of a stream belong; None: they cannot come this way.
        `advertised`: what the peer said of this transport."""

    def note_stream(self, peer: KVPeer, bytes_per_s: float) -> None:
        """Records how fast KV of this peer has just come over the stream alone."""
        return

    def close_idle(self, idle_s: float) -> None:
        """Forgets peers whose KV nothing has fetched for this many seconds: most of them are
        gone."""
        return

    def close(self) -> None:
        """No transfer is left, and no copy is on its way."""
        return
