"""Which experts of a layer a rank has, and how it finds them by the numbers that routers give.

experts of the checkpoint   0  1  2  3  4  5     copies that the ranks have, in the order of
on rank 0                   0  1  2              ranks, may be more: one of them computes a
on rank 1                            0  1  2     token, chosen by the token's place in the step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.expert_placement import Placement, copies_of, initial_placement
from engine.layers.shard import part_of
from engine.parallel.place import ExpertRanks

TURNS = 24
"""Tokens after which copies of an expert have each had their turns: up to 4 copies, and 6 or 8,
get equally many of them."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The experts of one rank.

    Attributes:
        total: Experts of the checkpoint.
        held: Their numbers, by those that they have on this rank.
        placement: Where all copies are, and `rank` among them; None: there is one of each, which
            stays where it is.
    """

    total: int
    held: tuple[int, ...]
    placement: Placement | None = None
    rank: int = 0

    @classmethod
    def of(cls, total: int, ranks: ExpertRanks) -> ExpertShare:
        """Returns equal shares in order, or as equal as can be, the larger ones first.

        Raises:
            ValueError: There is not an expert for each rank, or redundant ones do not fit.
        """
        if not ranks.are_whole:
            return cls(total, tuple(range(total)))
        if ranks.num_redundant is not None:
            placement = initial_placement(total, ranks.num_redundant, ranks.size)
            return cls(total, placement[ranks.rank], placement, ranks.rank)
        start, count = part_of(total, 1, ranks.rank, ranks.size)
        return cls(total, tuple(range(start, start + count)))

    def own_numbers(self, device: torch.device) -> Tensor | None:
        """Returns what `route_tokens` finds this rank's experts by: [E] int32, or, where copies
        move, [TURNS, E] int32 wherever they are. None: all are here, as the checkpoint numbers
        them."""
        if self.placement is not None:
            return turns_of_copies(self.placement, self.total, self.rank).to(device)
        if self.held == tuple(range(self.total)):
            return None
        own = torch.full((1, self.total), -1, dtype=torch.int32)
        own[0, list(self.held)] = torch.arange(len(self.held), dtype=torch.int32)
        return own.to(device)


def turns_of_copies(placement: Placement, num_experts: int, rank: int) -> Tensor:
    """Returns [TURNS, E] int32 on CPU: row t has the slots of the experts whose turn it is on
    `rank`, and -1 for all others."""
    table = torch.full((TURNS, num_experts), -1, dtype=torch.int32)
    for expert, copies in enumerate(copies_of(placement, num_experts)):
        for place, (of_rank, slot) in enumerate(copies):
            if of_rank == rank:
                # Steps of few tokens begin with another copy for each expert.
                table[(place - expert) % len(copies) :: len(copies), expert] = slot
    return table
