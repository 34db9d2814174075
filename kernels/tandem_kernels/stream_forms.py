"""Says how residual streams are mixed, as a value that has no need of Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FEW_ROWS, MANY_COUNT = 64, 4
"""The largest number of tokens for which `mix_streams` is made, and the number of streams for which
it is made of any tokens."""


@dataclass(frozen=True, slots=True)
class StreamForm:
    """Describes how weights of streams come about; see `reference.streams`.

    Attributes:
        iterations: How often columns are divided by their sums.
        eps: Added to weights and to sums that divide.
        norm_eps: Added to the mean square by whose root the logits are divided.
        fixed_order: A token's bits do not depend on the others.
    """

    iterations: int
    eps: float
    norm_eps: float
    fixed_order: bool = False


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """Holds the weights of one block, or of the head behind all; see `reference.streams`.

    Attributes:
        fn: [(2 + n) n, n H] float32, of a head [n, n H].
        base: [(2 + n) n] or [n] float32.
        scale: [3] or [1] float32.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class GivenToStreams:
    """Holds what a block gives to the streams, which they have not taken in.

    Attributes:
        x: [T, H].
        beside: [T, H], added to that; None: nothing is.
        post, comb: As `reference.streams.read_streams` returned them for the block.
    """

    x: Tensor
    beside: Tensor | None
    post: Tensor
    comb: Tensor
