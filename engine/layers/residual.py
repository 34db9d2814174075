"""The residual stream of one pass through a model."""

from __future__ import annotations

from torch import Tensor

from engine.layers.norm import RMSNorm


class ResidualStream:
    """The sum of what all layers have added so far, [T, H].

    What a layer adds waits until the next norm, which sums and normalises in one kernel; a GEMM
    that can add to the sum itself does so (`RowParallelLinear.add_to`).
    """

    def __init__(self, x: Tensor) -> None:
        self.sum = x
        self._waiting: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Adds [T, H] before the next read. Its memory may be reused."""
        assert self._waiting is None, "the stream is read between two additions"
        self._waiting = x

    def read(self, norm: RMSNorm | None) -> Tensor:
        """Returns what a block works on, [T, H]: the norm of the stream, or the stream itself."""
        if norm is not None:
            return self.normed(norm)
        if self._waiting is not None:
            self.sum = self.sum + self._waiting
            self._waiting = None
        return self.sum

    def normed(self, norm: RMSNorm) -> Tensor:
        """Returns the norm of the stream, [T, H]."""
        if self._waiting is None:
            normed: Tensor = norm(self.sum)
            return normed
        normed, self.sum = norm.add(self._waiting, self.sum)
        self._waiting = None
        return normed
