"""Gives a simulated cluster requests of batches, as many as its first router admits.

They come in the order of a list, over and over, for as long as others are still to come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.simulation.requests import SimRequest
from planner.simulation.virtual_time import VirtualTime
from router.placement.candidates.spare_nodes import SpareNodes
from router.request.tenants import Priority

_LOOK_S = 0.02


@dataclass(slots=True, kw_only=True)
class IdleWork:
    """Offers requests to a cluster. `spare` is of the router that admits them, `start` begins one,
    `goes_on` says whether others are still to come."""

    timeline: VirtualTime
    spare: SpareNodes
    requests: Sequence[SimRequest]
    start: Callable[[SimRequest], None]
    goes_on: Callable[[], bool]
    num_begun: int = 0

    def begin(self) -> None:
        """Looks from now on."""
        given = (of_batch(request) for request in itertools.cycle(self.requests))

        def look() -> None:
            self.spare.look()
            tokens, rooms = self.spare.free_tokens(""), self.spare.num_rooms("")
            while tokens > 0 and rooms > 0:
                request = replace(next(given), at_s=self.timeline.now)
                self.start(request)
                self.num_begun += 1
                tokens -= request.num_prompt
                rooms -= 1
            if self.goes_on():
                self.timeline.at(self.timeline.now + _LOOK_S, look)

        self.timeline.at(self.timeline.now, look)


def of_batch(request: SimRequest) -> SimRequest:
    """Returns the same request as one of a batch, without a session."""
    info = replace(request.info, priority=Priority.IDLE, session_key=b"")
    return replace(request, info=info)
