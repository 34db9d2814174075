"""The place of one rank in the parallel world."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.distributed import ParallelGroup


def _alone() -> ParallelGroup:
    return ParallelGroup(0, 1)


@dataclass(frozen=True, slots=True)
class ParallelPlace:
    """The groups that one rank belongs to, and its layers. A group of size 1 does nothing.

    Attributes:
        layers: Global indices of the layers of this pipeline stage.
        tp: Ranks that split each layer's heads, feed-forward units and vocabulary.
        pp: Ranks with the other stages.
        ep: Ranks that split the experts.
        dp: Ranks that hold the same weights and other requests.
    """

    layers: range
    tp: ParallelGroup = field(default_factory=_alone)
    pp: ParallelGroup = field(default_factory=_alone)
    ep: ParallelGroup = field(default_factory=_alone)
    dp: ParallelGroup = field(default_factory=_alone)
