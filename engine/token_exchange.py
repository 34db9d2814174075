"""How the tokens of a step get to the ranks with their experts, and the results back.

    x ─ gather ─▶ tokens of all ranks that compute together ─ own experts ─ combine ─▶ own tokens

One interface, so that a library that sends each token to the ranks of its experts only can take
its place beside these.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.distributed import ParallelGroup


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
        """Returns the sums over ranks of this rank's `num_tokens` own tokens, [T, H], from what
        its experts have made of all, [N, H], which may be overwritten."""


class Replicated:
    """Every rank has all tokens already; one all-reduce ends the layer."""

    def __init__(self, group: ParallelGroup) -> None:
        self._group = group

    def gather(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        return x, slot_mapping

    def combine(self, out: Tensor, num_tokens: int) -> Tensor:
        return self._group.all_reduce(out)
