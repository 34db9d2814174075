"""Holds what lies between two GEMMs when it is not a plain tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.parallel.distributed import ParallelGroup
from tandem_kernels import ops
from tandem_kernels.elementwise.norm_forms import Norm, PairedExperts


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows of e4m3 or int8 numbers, [T, K], and their scales, as `ops.quantise_fp8` or
    `ops.quantise_int8` makes them."""

    numbers: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True)
class UnscaledProduct:
    """A GEMM's output [T, N], still to be multiplied by a scale for each row and each output.

    The library's fastest GEMM leaves it so; norms and activations scale as they read.

    Attributes:
        row_scales, col_scales: Float32 of T and of N numbers.
    """

    product: Tensor
    row_scales: Tensor
    col_scales: Tensor

    def scaled(self) -> Tensor:
        """Returns the output itself, [T, N]. The product's memory is reused."""
        return ops.scale_product(self.product, self.row_scales, self.col_scales)


@dataclass(frozen=True, slots=True)
class PartialSum:
    """This rank's part [T, H] of a sum over ranks, which a norm may compute with what it does."""

    part: Tensor
    group: ParallelGroup

    def summed(self) -> Tensor:
        """Returns the sum, [T, H]. All ranks call it, once. The part's memory may be reused."""
        return self.group.all_reduce(self.part)


@dataclass(frozen=True, slots=True)
class PairOutputs:
    """Holds what each of a token's experts gives to it, [T * k, H], which a norm may sum with what
    it does.

    Attributes:
        experts: [T, k]; -1: none. None: `parts` [T, H] are sums.
        beside: [T, H], what a shared expert gives; None: nothing.
        gate: Of that; see `ops.pairs_add_rms_norm`.
    """

    parts: Tensor
    experts: Tensor | None
    beside: Tensor | None = None
    gate: tuple[Tensor, Tensor] | None = None

    def summed(self) -> Tensor:
        """Returns the sum over a token's experts, [T, H]."""
        beside = self.beside
        if beside is not None and self.gate is not None:
            beside = ops.row_gate(beside, *self.gate)
        return ops.sum_pairs(self.parts, self.experts, beside)


@dataclass(frozen=True, slots=True)
class UnnormedSum:
    """Holds what a block gives, [T, H], whose norm is added to the stream; the kernel that does so
    may norm the new stream for its readers, too.

    Attributes:
        by: The norm.
        paired: What experts give beside the block; None: nothing.
        scale: [1], multiplies the stream behind the addition; None: nothing does.
    """

    given: Tensor
    by: Norm
    paired: PairedExperts | None = None
    scale: Tensor | None = None

    def add_to(self, stream: Tensor, *readers: Norm) -> tuple[Tensor, ...]:
        """Adds it to `stream` [T, H]. Returns the norms of that, [T, H] for each reader."""
        return ops.add_normed(self.given, stream, self.by, readers, self.scale, self.paired)

    def summed(self) -> Tensor:
        """Returns what is added, [T, H]."""
        added = torch.zeros_like(self.given)
        self.add_to(added)
        return added


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """Rows of the residual stream, [T, K], whose norm is left to their reader.

    They are the stream itself: they are read before anything is added to it.
    """

    stream: Tensor
    weight: Tensor
    eps: float

    def __len__(self) -> int:
        return len(self.stream)

    def normed(self) -> Tensor:
        """Returns their norm, [T, K]."""
        return ops.rms_norm(self.stream, self.weight, self.eps)


Rows = Tensor | QuantisedRows
"""Inputs of a linear layer."""


@dataclass(frozen=True, slots=True)
class RowForm:
    """Says how a GEMM wants its rows quantised, and does it, with what computes them.

    Attributes:
        numbers: Their type.
        group: This many of e4m3 share a scale; 0: all of a row.
    """

    numbers: Literal["e4m3", "int8"] = "e4m3"
    group: int = 0

    def quantised(self, x: Rows) -> QuantisedRows:
        """Returns rows in this form, which those that are quantised have."""
        if isinstance(x, QuantisedRows):
            return x
        if self.numbers == "int8":
            return QuantisedRows(*ops.quantise_int8(x))
        return QuantisedRows(*ops.quantise_fp8(x, self.group))

    def normed(
        self, x: Tensor | UnscaledProduct, residual: Tensor | None, weight: Tensor, eps: float
    ) -> QuantisedRows:
        """Returns the norm of `x` [T, K], or of its sum with `residual` [T, K], which becomes the
        sum."""
        x, *scales = _parts_of(x)
        if self.numbers == "int8":
            return QuantisedRows(*ops.rms_norm_int8(x, residual, weight, eps, *scales))
        return QuantisedRows(*ops.rms_norm_fp8(x, residual, weight, eps, self.group, *scales))

    def activated(self, x: Tensor | UnscaledProduct, is_gelu: bool) -> QuantisedRows:
        """Returns the gated activation [T, I] of `x` [T, 2 I]."""
        x, *scales = _parts_of(x)
        if self.numbers == "int8":
            return QuantisedRows(*ops.silu_and_mul_int8(x, is_gelu, *scales))
        return QuantisedRows(*ops.silu_and_mul_fp8(x, is_gelu, self.group, *scales))


def _parts_of(x: Tensor | UnscaledProduct) -> tuple[Tensor, ...]:
    """Returns what operations are given of a product."""
    if isinstance(x, UnscaledProduct):
        return x.product, x.row_scales, x.col_scales
    return (x,)
