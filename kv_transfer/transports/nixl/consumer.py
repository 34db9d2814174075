"""The consumer's side of NIXL: reads KV out of the windows of prefill nodes anywhere.

1. start      a window of ours is registered; if NIXL does not start, it says so once
2. `fetch`    a peer that was never asked is met, as `nixl/peers.py` has it; until it has
              answered its KV comes over another transport, so a network that lets calls through
              but not UCX costs nothing
3. messages   say what lies in a peer's window, as `nixl/window_assembler.py` has it
4. a read failed, or hung: its transfer fails, and the peer's KV comes another way from then on
5. all slots hang: no peer's KV comes this way until one of their reads has ended
"""

from __future__ import annotations

import logging
from functools import lru_cache

import msgspec

from kv_transfer.config import KVTransferConfig
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.device import DeviceError
from kv_transfer.metadata import KVPeer
from kv_transfer.transports.base import ConsumerTransport, TransportId
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlError
from kv_transfer.transports.nixl.peers import Peers
from kv_transfer.transports.nixl.window import open_window
from kv_transfer.transports.nixl.window_assembler import WindowAssembler
from kv_transfer.transports.nixl.window_reads import ReadQueue
from kv_transfer.wire.chunk_grid import blocks_per_chunk, longest_chunk

logger = logging.getLogger(__name__)


class NixlConsumer(ConsumerTransport):
    """Works with peers whose NIXL can be reached from here."""

    id = TransportId.NIXL
    is_one_stream_enough = True

    def __init__(
        self, config: KVTransferConfig, cache: KVCacheView, *, has_to_win: bool = False
    ) -> None:
        """Reads peers, if it `has_to_win` only such as are read faster than over the stream."""
        super().__init__(cache)
        self._patience_s = config.stall_timeout_s
        self._warned: set[str] = set()
        self.queue: ReadQueue | None = None
        try:
            longest = longest_chunk(cache.layout, config.chunk_bytes)
            window = open_window(config, cache.device, longest)
            self.queue = ReadQueue(window, lambda error: cache.copies.on_error(error))
            self.peers = Peers(self.queue, has_to_win=has_to_win)
        except (NixlError, DeviceError) as error:
            logger.warning("KV does not come through NIXL: %s", error)

    def fetch(self, job: FetchJob, advertised: bytes) -> ChunkAssembler | None:
        queue, node = self.queue, job.meta.peer
        if queue is None:
            return None
        advert = _advert(advertised)
        if advert is None:
            self._warn(f"{node.engine_id} described its window wrongly")
            return None
        if longest_share(job, advert.chunk_bytes) > queue.window.slot_bytes:
            self._warn(
                f"chunks of {node.engine_id} do not fit into the {queue.window.slot_bytes} bytes "
                f"of a slot here, so its KV does not come through NIXL; raise "
                f"--kv-nixl-window-bytes here, or lower its --kv-chunk-bytes"
            )
            return None
        if queue.is_stuck(self._patience_s):
            self._warn("no KV comes through NIXL: reads that do not end fill the window")
            return None
        peer = self.peers.acquire((node.engine_id, node.epoch, advert.agent), advert)
        if peer is None:
            return None
        return WindowAssembler(job, self._cache, self.id, peer, queue, self._patience_s)

    def note_stream(self, peer: KVPeer, bytes_per_s: float) -> None:
        if self.queue is not None:
            self.peers.note_stream(peer.engine_id, peer.epoch, bytes_per_s)

    def close_idle(self, idle_s: float) -> None:
        if self.queue is not None:
            self.peers.close_idle(idle_s)

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close()

    def _warn(self, line: str) -> None:
        """Says it once."""
        if line not in self._warned:
            self._warned.add(line)
            logger.warning("%s", line)


def longest_share(job: FetchJob, chunk_bytes: int) -> int:
    """Returns the bytes of the longest chunk that this job brings from a peer with this setting."""
    theirs = job.layout
    pairs = zip(theirs.groups, job.source.share, strict=True)
    return max(
        blocks_per_chunk(chunk_bytes, group.bytes_needed(theirs.tp_size)) * page.num_bytes
        for group, page in pairs
    )


@lru_cache(maxsize=64)
def _advert(advertised: bytes) -> NixlAdvert | None:
    """Returns None for what is no advert."""
    try:
        advert = msgspec.msgpack.decode(advertised, type=NixlAdvert)
    except msgspec.MsgspecError:
        return None
    is_possible = min(advert.num_slots, advert.slot_bytes, advert.chunk_bytes) > 0
    return advert if is_possible and min(advert.address, advert.leases) > 0 else None
