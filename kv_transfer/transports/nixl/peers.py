"""Peers whose windows are read through NIXL.

1. `acquire`      one that is asked for the first time is connected, and a word of it read; until
                  that is here, or if it does not come, its KV has to come another way. Where NIXL
                  has to win, so it does until the peer's window was read faster than its KV has
                  come over the stream (`rate_trial`)
2. `Peer.release` a stream has ended
3. `Peer.give_up` a read failed or hung: its KV comes another way from then on
4. `close_idle`   nothing has read it for long: its node may have been started anew
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlError
from kv_transfer.transports.nixl.rate_trial import RateTrial
from kv_transfer.transports.nixl.window_reads import PeerMemory, ReadQueue, WindowRead

CONNECT_S = 10.0
_WINS_BY = 1.2
"""A trial is short, and the stream's rate that of a prompt which was still computed, perhaps."""

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
    is_logged: bool = False
    """Whether the log says that it is read."""
    trial: RateTrial | None = None
    is_slower: bool = False
    """NIXL has lost: the stream is as fast."""

    def give_up(self, why: str) -> None:
        """Reads it no more."""
        if not self.is_lost:
            self.is_lost = True
            logger.warning("%s cannot be read through NIXL: %s", self.engine, why)

    def release(self) -> None:
        self.num_users -= 1
        self.used_at = time.monotonic()


class Peers:
    """All that `queue` reads, or has tried to read. `has_to_win`: only where it is faster than the
    stream."""

    def __init__(self, queue: ReadQueue, *, has_to_win: bool = False) -> None:
        self._queue = queue
        self._has_to_win = has_to_win
        self._stream_rates: dict[tuple[str, int], float] = {}
        """The best of each engine and epoch, bytes a second."""
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
        if not self._is_ready(peer) or (self._has_to_win and not self._has_won(peer, name)):
            return None
        self._tell(peer)
        peer.num_users += 1
        return peer

    def note_stream(self, engine: str, epoch: int, bytes_per_s: float) -> None:
        node = engine, epoch
        if any(name[:2] == node for name in self._known):
            best = self._stream_rates.get(node, 0.0)
            self._stream_rates[node] = max(best, bytes_per_s)

    def close_idle(self, idle_s: float) -> None:
        horizon = time.monotonic() - idle_s
        for name, peer in list(self._known.items()):
            is_idle = peer.num_users == 0 and peer.used_at < horizon
            if is_idle and not self._queue.reads_from(peer.memory):
                del self._known[name]
                self._stream_rates.pop(name[:2], None)
                self._disconnect(peer)

    def _is_ready(self, peer: Peer) -> bool:
        first = peer.first_word
        if not first.has_ended and first.waited_s > CONNECT_S:
            self._queue.abandon(first, f"no answer within {CONNECT_S:g} s")
        if first.error:
            peer.give_up(first.error)
        return first.word is not None and not peer.is_lost

    def _has_won(self, peer: Peer, name: PeerName) -> bool:
        """Returns whether this peer is read faster than its KV comes over the stream. Begins to
        find out."""
        if peer.is_logged or peer.is_slower:
            return not peer.is_slower
        if peer.trial is None:
            peer.trial = RateTrial(self._queue, peer.memory)
            peer.trial.begin()
        trial, of_stream = peer.trial, self._stream_rates.get(name[:2])
        if trial.error:
            peer.give_up(trial.error)
        if trial.rate is None or of_stream is None:
            return False
        peer.is_slower = trial.rate < _WINS_BY * of_stream
        logger.info(
            "%s is read at %.2f GB/s through NIXL, and at %.2f over the stream",
            peer.engine, trial.rate / 1e9, of_stream / 1e9,
        )  # fmt: skip
        return not peer.is_slower

    def _tell(self, peer: Peer) -> None:
        if not peer.is_logged:
            peer.is_logged = True
            logger.info("%s is read through NIXL from now on", peer.engine)

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
            logger.info("of a peer that is not read any more: %s", error)
