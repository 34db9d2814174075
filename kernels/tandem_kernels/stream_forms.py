"""Says how residual streams are mixed, as a value that has no need of Triton."""

from __future__ import annotations

from dataclasses import dataclass


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
