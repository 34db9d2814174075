"""Describes norms around a block, as values that have no need of Triton.

x ─ norm ─(+)─ times ─┬─ residual stream
           │          └─ norms of what reads it next
    residual stream
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """Describes a root-mean-square norm.

    Attributes:
        weight: [H].
        eps: Added to the mean square.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class PairedExperts:
    """Holds what experts give beside a dense block: both are normed before they are added up.

    Attributes:
        parts, experts: See `reference.experts.sum_pairs`.
        dense, sparse: The norms of what the dense block gives, and of the experts' sum.
    """

    parts: Tensor
    experts: Tensor | None
    dense: Norm
    sparse: Norm
