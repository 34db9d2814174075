"""Stands in for a layer whose weights are written out in half precision for one GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from engine.layers.methods.base import LinearLayer


@dataclass(frozen=True, slots=True)
class _WrittenOut:
    weight: Tensor
    bias: Tensor | None


def written_out(weight: Tensor, bias: Tensor | None) -> LinearLayer:
    """Returns what methods of plain weights read of a layer: [out, in] and [out] or None."""
    return cast(LinearLayer, _WrittenOut(weight, bias))
