"""How quickly peers give prefixes, and whether that beats computing them: by what was seen.

1. `asked`      a peer has said what it holds; how long that took
2. `pulled`     its KV is here; how many tokens, in how many seconds
3. `is_quicker` seconds to ask and pull so many tokens, against seconds to compute them

A peer of which nothing is known is tried. One that lost is tried again after a while, since what
made it slow may be over: the later, the slower it was, so that tries never cost more than a small
part of what computing does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.sched.counters import PrefillRate

_DECAY = 0.8
"""Weight that a pull leaves to those before it."""
_TRY_AGAIN_AFTER = 32
"""Decisions against a peer as slow as we are until it gets another chance; against one that takes
twice as long, twice as many."""
_MAX_PEERS = 256


@dataclass(slots=True)
class _Peer:
    ask_s: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    num_refusals: int = 0

    def seconds_for(self, num_tokens: int) -> float:
        """Returns how long it takes to get so many tokens; as good as none before the first."""
        return self.ask_s + (num_tokens * self.seconds / self.tokens if self.tokens else 0.0)


class PullRates:
    """Remembers the peers used last, by address. `prefill`: the speed of this node's own steps."""

    def __init__(self, prefill: PrefillRate, *, pulls_always: bool = False) -> None:
        self._prefill = prefill
        self._pulls_always = pulls_always
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def asked(self, peer: str, seconds: float) -> None:
        known = self._of(peer)
        known.ask_s = seconds if not known.ask_s else known.ask_s + (seconds - known.ask_s) / 4

    def pulled(self, peer: str, num_tokens: int, seconds: float) -> None:
        known = self._of(peer)
        known.tokens = known.tokens * _DECAY + num_tokens
        known.seconds = known.seconds * _DECAY + seconds
        known.num_refusals = 0

    def is_quicker(self, peer: str, num_tokens: int, *, has_asked: bool = False) -> bool:
        """Returns whether `num_tokens` are sooner here from the peer than computed. `has_asked`:
        the peer has answered, and only the pull is left."""
        own = self._prefill.tokens_per_s
        known = self._of(peer)
        seconds = known.seconds_for(num_tokens) - known.ask_s * has_asked
        if self._pulls_always or not own or seconds * own < num_tokens:
            return True
        known.num_refusals += 1
        if known.num_refusals < _TRY_AGAIN_AFTER * seconds * own / num_tokens:
            return False
        known.num_refusals = 0
        return True

    def _of(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer()
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        return known
