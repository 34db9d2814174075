"""Which experts of a layer a rank has, and how it finds them by the numbers that routers give.

experts of the checkpoint   0  1  2  3  4  5     copies that the ranks have, in the order of
on rank 0                   0  1  2              ranks, may be more: one of them computes a
on rank 1                            0  1  2     token, chosen by the token's place in the step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.shard import part_of
from engine.parallel import ExpertRanks


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The experts of one rank.

    Attributes:
        total: Experts of the checkpoint.
        held: Their numbers, by those that they have on this rank.
    """

    total: int
    held: tuple[int, ...]

    @classmethod
    def of(cls, total: int, ranks: ExpertRanks) -> ExpertShare:
        """Returns equal shares in order, or as equal as can be, the larger ones first.

        Raises:
            ValueError: There is not an expert for each rank.
        """
        if not ranks.are_whole:
            return cls(total, tuple(range(total)))
        start, count = part_of(total, 1, ranks.rank, ranks.size)
        return cls(total, tuple(range(start, start + count)))

    def own_numbers(self, device: torch.device) -> Tensor | None:
        """Returns what `route_tokens` finds this rank's experts by; None: all are here, as the
        checkpoint numbers them."""
        if self.held == tuple(range(self.total)):
            return None
        own = torch.full((1, self.total), -1, dtype=torch.int32)
        own[0, list(self.held)] = torch.arange(len(self.held), dtype=torch.int32)
        return own.to(device)
