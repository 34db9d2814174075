"""Peers whose windows are read through NIXL.

1. `acquire`      one that is asked for the first time is connected, and a word of it read; until
                  that is here, or if it does not come, its KV has to come another way
2. `Peer.release` a stream has ended
3. `Peer.give_up` a read failed or hung: its KV comes another way from then on
4. `close_idle`   nobody has read it for long: its node may have been started anew
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlError
from kv_transfer.transports.nixl.window_reads import PeerMemory, ReadQueue, WindowRead

CONNECT_S = 10.0

logger = logging.getLogger(__name__)

PeerName = tuple[str, int, bytes]
"""Engine id, epoch, metadata of the agent."""


@dataclass(eq=False, slots=True)
class Peer:
    """One transfer process of the node `engine`."""

    engine: str
    memory: PeerMemory
    first_word: WindowRead
    num_users: int = 0
    used_at: float = 0.0
    is_lost: bool = False
    is_told: bool = False
    """Whether the log says that it is read."""

    def give_up(self, why: str) -> None:
        """Reads it no more."""
        if not self.is_lost:
            self.is_lost = True
            logger.warning("%s cannot be read through NIXL: %s", self.engine, why)

    def release(self) -> None:
        self.num_users -= 1
        self.used_at = time.monotonic()


class Peers:
    """All that `queue` reads, or has tried to read."""

    def __init__(self, queue: ReadQueue) -> None:
        self._queue = queue
        self._known: dict[PeerName, Peer] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._known.values())

    def acquire(self, name: PeerName, advert: NixlAdvert) -> Peer | None:
        """Returns a peer to be given back by `release`. None: it cannot be read now."""
        peer = self._known.get(name)
        if peer is None:
            peer = self._known[name] = self._connected(name[0], advert)
        peer.used_at = time.monotonic()
        if not self._is_ready(peer):
            return None
        peer.num_users += 1
        return peer

    def close_idle(self, idle_s: float) -> None:
        horizon = time.monotonic() - idle_s
        for name, peer in list(self._known.items()):
            is_idle = peer.num_users == 0 and peer.used_at < horizon
            if is_idle and not self._queue.reads_from(peer.memory):
                del self._known[name]
                self._disconnect(peer)

    def _is_ready(self, peer: Peer) -> bool:
        first = peer.first_word
        if not first.has_ended and first.waited_s > CONNECT_S:
            self._queue.abandon(first, f"no answer within {CONNECT_S:g} s")
        if first.error:
            peer.give_up(first.error)
        is_ready = first.word is not None and not peer.is_lost
        if is_ready and not peer.is_told:
            peer.is_told = True
            logger.info("%s is read through NIXL from now on", peer.engine)
        return is_ready

    def _connected(self, engine: str, advert: NixlAdvert) -> Peer:
        """Returns a peer of which one word is asked for."""
        error, name = "", ""
        try:
            name = self._queue.window.agent.connect(advert.agent)
        except NixlError as found:
            error = str(found)
        memory = PeerMemory(
            name,
            advert.address,
            advert.num_slots,
            advert.slot_bytes,
            advert.device,
            advert.leases,
        )
        first = WindowRead(memory, (0, 0), error=error)
        if not error:
            self._queue.begin(first)
        return Peer(engine, memory, first)

    def _disconnect(self, peer: Peer) -> None:
        try:
            self._queue.window.agent.forget(peer.memory.name)
        except NixlError as error:
            logger.info("of a peer that nobody reads any more: %s", error)
