"""The consumer's side of NIXL: reads KV out of the caches of prefill nodes anywhere.

    1. start      our cache is registered; if NIXL does not start, it says so once
    2. `fetch`    a peer that is asked for the first time is connected, and a word of it read; until
                  that is here its KV comes over another transport, so a network that lets calls
                  through but not UCX costs nothing
    3. messages   name blocks, as `named/names_assembler.py` has it
    4. a read failed: its transfer fails, and the peer's KV comes another way from then on
    5. a read neither comes nor fails: this process ends, because only that keeps the read out of
       memory that others get

Pieces that are adjacent in the page of both ends are read as one. Where they would be small, as the
nodes differ in tensor-parallel or block size, another transport gathers them better.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import PeerLost, TransferTimeout
from kv_transfer.memory.cache_view import CachePlaces, KVCacheView
from kv_transfer.memory.copy_stream import Copier
from kv_transfer.memory.page_copy import page_copy
from kv_transfer.transports.base import ConsumerTransport, TransportId
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.named.names_assembler import NamesAssembler, PeerBlocks
from kv_transfer.transports.named.read_leases import LeaseName
from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, registered_agent
from kv_transfer.transports.nixl.peer_reads import PeerMemory, PeerReads, ReadBatch, ReadQueue

MIN_PIECE_BYTES = 1024
"""Over TCP, UCX reads 2 KiB pieces at half the rate of large ones, and smaller ones slower."""
CONNECT_S = 10.0

logger = logging.getLogger(__name__)

_Name = tuple[str, int, int, bytes]
"""Engine id, epoch, rank, metadata of the agent."""


@dataclass(eq=False, slots=True)
class _Peer:
    reads: PeerReads
    first_word: ReadBatch
    num_users: int = 0
    used_at: float = 0.0
    is_lost: bool = False
    is_told: bool = False
    """Whether the log says that it is read."""


class NixlConsumer(ConsumerTransport):
    """Works with peers whose NIXL can be reached from here."""

    id = TransportId.NIXL
    is_one_stream_enough = True

    def __init__(self, config: KVTransferConfig, cache: KVCacheView) -> None:
        super().__init__(cache)
        self._patience_s = config.stall_timeout_s
        self._peers: dict[_Name, _Peer] = {}
        self._queue: ReadQueue | None = None
        try:
            self._queue = ReadQueue(registered_agent(config.hosts, cache))
        except NixlError as error:
            logger.warning("KV does not come through NIXL: %s", error)

    def fetch(self, job: FetchJob, advertised: bytes) -> ChunkAssembler | None:
        advert = _advert(advertised)
        engine = job.meta.peer.engine_id
        if self._queue is None or not self._is_worth_it(job):
            return None
        if advert is None or not 0 <= advert.rank < job.meta.peer.layout.num_ranks:
            logger.warning("%s described its cache wrongly", engine)
            return None
        name = (engine, job.meta.peer.epoch, advert.rank, advert.agent)
        peer = self._peer(self._queue, name, advert)
        peer.used_at = time.monotonic()
        if not self._is_ready(self._queue, peer, engine):
            return None
        layout = job.meta.peer.layout.of_rank(advert.rank)
        places = CachePlaces(advert.rank, advert.num_blocks, layout, advert.address)
        return NamesAssembler(job, self._cache, self.id, RemoteBlocks(places, peer))

    async def settled(self) -> None:
        if self._queue is None:
            return
        try:
            await self._queue.settled(self._patience_s)
        except TransferTimeout as error:
            self._cache.copies.on_error(error)
            raise

    def close_idle(self, idle_s: float) -> None:
        queue, horizon = self._queue, time.monotonic() - idle_s
        if queue is None:
            return
        for name, peer in list(self._peers.items()):
            is_idle = peer.num_users == 0 and peer.used_at < horizon
            if is_idle and not queue.reads_from(peer.reads.memory):
                del self._peers[name]
                _disconnect(queue.agent, peer.reads.memory)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()

    def _is_worth_it(self, job: FetchJob) -> bool:
        """Returns whether the pieces that a stream of this job would read are large."""
        theirs = job.layout
        pairs = zip(job.source.share, self._cache.pages, strict=True)
        for group, (share, ours) in enumerate(pairs):
            if share.num_bytes:
                copy = page_copy(ours, theirs.page(group, job.source.peer_rank), share)
                if copy.smallest_piece < MIN_PIECE_BYTES:
                    return False
        return True

    def _peer(self, queue: ReadQueue, name: _Name, advert: NixlAdvert) -> _Peer:
        if name not in self._peers:
            self._peers[name] = _connected(queue, self._cache.device.number, advert)
        return self._peers[name]

    def _is_ready(self, queue: ReadQueue, peer: _Peer, engine: str) -> bool:
        if peer.is_lost:
            return False
        first = peer.first_word
        if not first.has_ended and first.waited_s > CONNECT_S:
            queue.abandon(first, f"no answer within {CONNECT_S:g} s")
        if first.error:
            logger.warning("%s cannot be read through NIXL: %s", engine, first.error)
            peer.is_lost = True
        is_ready = first.word is not None and not peer.is_lost
        if is_ready and not peer.is_told:
            peer.is_told = True
            logger.info("%s is read through NIXL from now on", engine)
        return is_ready


class RemoteBlocks(PeerBlocks):
    """A peer's cache that is read through NIXL, as one stream sees it."""

    def __init__(self, places: CachePlaces, peer: _Peer) -> None:
        self.places = places
        self._peer = peer
        self._batches: list[ReadBatch] = []
        peer.num_users += 1

    @property
    def copier(self) -> Copier:
        return self._peer.reads

    def copies_issued(self, lease: LeaseName) -> None:
        self._batches.append(self._peer.reads.post(lease))

    def is_held(self, lease: LeaseName) -> bool:
        for batch in self._batches:
            if batch.error:
                self._peer.is_lost = True
                raise PeerLost(batch.error)
        return all(batch.word == lease[1] for batch in self._batches)

    def release(self) -> None:
        self._peer.num_users -= 1
        self._peer.used_at = time.monotonic()


def _connected(queue: ReadQueue, device: int | None, advert: NixlAdvert) -> _Peer:
    """Returns a peer of which one word is asked for."""
    error, name = "", ""
    try:
        name = queue.agent.connect(advert.agent)
    except NixlError as found:
        error = str(found)
    memory = PeerMemory(name, advert.leases, (device, advert.device))
    reads = PeerReads(queue, memory)
    first = ReadBatch(memory, 0, error=error) if error else reads.post((0, 0))
    return _Peer(reads, first)


def _disconnect(agent: NixlAgent, memory: PeerMemory) -> None:
    try:
        agent.forget(memory.name)
    except NixlError as error:
        logger.info("of a peer that nobody reads any more: %s", error)


@lru_cache(maxsize=64)
def _advert(advertised: bytes) -> NixlAdvert | None:
    """Returns None for what is no advert."""
    try:
        return msgspec.msgpack.decode(advertised, type=NixlAdvert)
    except msgspec.MsgspecError:
        return None
