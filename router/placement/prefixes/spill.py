"""Decides when a request leaves the node that has the most of its prompt cached.

    stay while    cost(holder) ≤ cost(best) + part · (ratio · cost(best) + services · mean service)
    part          1 from a quarter of the prompt on, in proportion below; nothing cached, no margin

What leaving costs is in the costs already: the tokens that the best node would compute anew. The
margin is for what estimates do not know: loads are a moment old, and without one all run
after the same idle node. It must not be there for requests that lose nothing by leaving. Costs
grow with the queues and count computing several times, so a share of them soon exceeds whole
prompts of queue: with a margin for all prompts waited at one node while another idled, and
at two thirds of what three nodes can compute TTFT's p99 was 3.6 times that of `least-loaded`
(docs/routing.md).
"""

from __future__ import annotations

from dataclasses import dataclass

_FULL_PART = 0.25
"""This much of a prompt makes it the holder's."""


@dataclass(frozen=True, slots=True)
class Margin:
    ratio: float
    services: float

    def keeps(
        self, holder_s: float, best_s: float, mean_service_s: float, cached_part: float
    ) -> bool:
        """Returns whether the holder of `cached_part` of the prompt may cost `holder_s` when the
        best node costs `best_s`."""
        part = min(1.0, cached_part / _FULL_PART)
        margin_s = part * (self.ratio * best_s + self.services * mean_service_s)
        return holder_s <= best_s + margin_s


MARGIN = Margin(ratio=0.25, services=0.25)
"""The value that did best in simulation (docs/routing.md)."""
