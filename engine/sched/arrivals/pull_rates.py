"""How quickly peers give prefixes, and whether that beats computing them: by what was seen.

1. `asked`      a peer has said what it holds; how long that took
2. `pulled`     its KV is here; how many tokens, in how many seconds
   `failed`     it did not come: a peer that cannot be pulled from is left alone like a slow one
3. `is_quicker` seconds to ask and pull this many tokens, against seconds to compute them

`SourceRate` says what is tried although it looks slower. With logs at debug each decision is
written with the figures that made it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from engine.sched.arrivals.source_rate import PullDecision, SourceRate
from engine.sched.counters import PrefillRate

_MAX_PEERS = 256

logger = logging.getLogger(__name__)


class PullRates:
    """Remembers the peers used last, by address. `prefill`: the speed of this node's own steps."""

    def __init__(self, prefill: PrefillRate, *, pulls_always: bool = False) -> None:
        self._prefill = prefill
        self._pulls_always = pulls_always
        self._peers: OrderedDict[str, SourceRate] = OrderedDict()

    def asked(self, peer: str, seconds: float) -> None:
        known = self._of(peer)
        known.ask_s = seconds if not known.ask_s else known.ask_s + (seconds - known.ask_s) / 4

    def pulled(self, peer: str, num_tokens: int, seconds: float) -> None:
        self._of(peer).took(num_tokens, seconds, self._prefill.seconds_for(num_tokens))
        logger.debug(
            "prefix of %d tokens from %s: here after %.1f ms", num_tokens, peer, seconds * 1e3
        )

    def failed(self, peer: str, num_tokens: int, seconds: float) -> None:
        """Learns that `num_tokens` did not come, which was known after `seconds`."""
        self._of(peer).failed(num_tokens, seconds, self._prefill.seconds_for(num_tokens))

    def is_quicker(self, peer: str, num_tokens: int, *, has_asked: bool = False) -> bool:
        """Returns whether `num_tokens` are sooner here from the peer than computed, as far as is
        known, or worth a try. `has_asked`: the peer has answered, and only the pull is left."""
        return self.verdict(peer, num_tokens, has_asked=has_asked).is_to_take

    def verdict(self, peer: str, num_tokens: int, *, has_asked: bool = False) -> PullDecision:
        """Decides as `is_quicker` does, and says why."""
        own = self._prefill.tokens_per_s
        known = self._of(peer)
        seconds = known.seconds_for(num_tokens) - known.ask_s * has_asked
        if self._pulls_always or not own:
            found = PullDecision.ON_TRUST
        else:
            found = known.verdict(seconds, num_tokens / own, num_tokens)
        if logger.isEnabledFor(logging.DEBUG):
            setup, each = known.parts
            logger.debug(
                "prefix of %d tokens from %s%s: %s; pull %.1f ms (ask %.1f, setup %.1f, %.0f "
                "tokens/s, %d pulls), compute %.1f ms (%.0f tokens/s), credit %.1f ms",
                num_tokens, peer, ", asked" if has_asked else "", found,
                seconds * 1e3, known.ask_s * 1e3, setup * 1e3, 1 / each if each else 0.0,
                known.num_takes, num_tokens / own * 1e3 if own else 0.0, own, known.credit_s * 1e3,
            )  # fmt: skip
        return found

    def _of(self, peer: str) -> SourceRate:
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = SourceRate()
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        return known
