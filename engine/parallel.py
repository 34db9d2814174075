"""The place of one rank in the parallel world."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.distributed import ParallelGroup
from engine.token_exchange import Replicated, TokenExchange


def _alone() -> ParallelGroup:
    return ParallelGroup(0, 1)


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The place of one rank among those that share the experts of a layer.

    Attributes:
        are_whole: Each rank has whole experts, some of them; else a slice of every one.
    """

    rank: int
    size: int
    are_whole: bool = False


@dataclass(frozen=True, slots=True)
class ParallelPlace:
    """The groups that one rank belongs to, and its layers. A group of size 1 does nothing.

    Attributes:
        layers: Global indices of the layers of this pipeline stage.
        tp: Ranks that split each layer's heads, feed-forward units and vocabulary.
        pp: Ranks with the other stages.
        ep: Ranks that share the experts; None: those of `tp`, a slice of every expert each.
        dp: Ranks that hold the same weights and other requests.
        exchange: See `token_exchange`; None: all ranks have the same tokens.
    """

    layers: range
    tp: ParallelGroup = field(default_factory=_alone)
    pp: ParallelGroup = field(default_factory=_alone)
    ep: ExpertRanks | None = None
    dp: ParallelGroup = field(default_factory=_alone)
    exchange: TokenExchange | None = None

    @property
    def token_exchange(self) -> TokenExchange:
        """Returns how tokens get to the ranks with their experts."""
        return self.exchange or Replicated(self.tp)

    @property
    def expert_ranks(self) -> ExpertRanks:
        return self.ep or ExpertRanks(self.tp.rank, self.tp.size)
