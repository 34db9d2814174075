"""How the tokens of a step get to the ranks with their experts, and the results back.

    x ─ gather ─▶ tokens of all ranks that compute together ─ own experts ─ combine ─▶ own tokens

One interface, so that a library that sends each token to the ranks of its experts only can take
its place beside these.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.parallel.distributed import ParallelGroup


class TokenExchange(Protocol):
    """`gather` and `combine` are collectives: all ranks call them alike, once a layer each."""

    def gather(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens that this rank's experts may be asked for.

        Args:
            x: [T, H] of this rank's own tokens.
            slot_mapping: [T] int64; a token at -1 is padding.

        Returns:
            ([N, H], [N]) in the same order on all ranks.
        """

    def combine(self, out: Tensor, num_tokens: int) -> Tensor:
        """Returns what has come together of this rank's `num_tokens` own tokens, [T, H], from what
        its experts have made of all, [N, H], which may be overwritten. An all-reduce over the
        tensor-parallel ranks completes the sum."""


class Replicated:
    """Every rank has all tokens already; the all-reduce alone ends the layer."""

    def gather(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        return x, slot_mapping

    def combine(self, out: Tensor, num_tokens: int) -> Tensor:
        return out


class GatherScatter:
    """Groups of ranks have tokens of their own: an all-gather brings them together, padded to the
    same number in each, and the sums return by a reduce-scatter: over memory that ranks share, as
    far as the group's `PeerExchanger` takes this many tokens, and by the library beyond.

    Args:
        group: The ranks with the same place in each of the groups.

    Attributes:
        num_rows: Tokens of the group that has most in this step; None: all have as many as this
            one, as in steps that are recorded.
    """

    num_rows: int | None = None

    def __init__(self, group: ParallelGroup) -> None:
        self._group = group

    def gather(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = len(x) if self.num_rows is None else self.num_rows
        if num_rows < len(x):
            raise ValueError(f"{len(x)} tokens to exchange, and all ranks count on {num_rows}")
        by_writes = self._group.exchanger
        if by_writes is not None and (found := by_writes.gather(x, slot_mapping, num_rows)):
            return found
        if num_rows > len(x):
            missing = num_rows - len(x)
            x = torch.cat((x, x.new_zeros((missing, x.shape[1]))))
            slot_mapping = torch.cat((slot_mapping, slot_mapping.new_full((missing,), -1)))
        return self._group.gather_rows(x), self._group.gather_rows(slot_mapping)

    def combine(self, out: Tensor, num_tokens: int) -> Tensor:
        return self._group.sum_own_rows(out)[:num_tokens]
