"""The interface of weight formats: how a checkpoint holds a quantised matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.layers.methods.base import LinearLayer, LinearMethod, LinearPart, Wrapped, bias_weights
from engine.layers.shard import CheckpointWeight, TensorSlice


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Says what is read of a checkpoint for a part of a matrix.

    Attributes:
        slices: The matrix's own numbers first.
        dequantise: Is given these slices, and returns the part in float32, [outputs, inputs].
        beside: Names of tensors that may be in the checkpoint as well and are not needed.
    """

    slices: tuple[TensorSlice, ...]
    dequantise: Callable[..., Tensor]
    beside: tuple[str, ...] = ()


class WeightFormat(ABC):
    """Knows names, shapes and meaning of the tensors that hold a matrix."""

    @abstractmethod
    def matrix(self, part: LinearPart, num_outputs: int, num_inputs: int) -> StoredMatrix:
        """Returns how to read a part of `num_outputs` x `num_inputs`, as `LinearPart.start` and
        `dim` cut it. Its `order` is left to the caller."""


def dequantised_weight(target: Tensor, part: LinearPart, form: WeightFormat) -> CheckpointWeight:
    """Returns the source of `target` [outputs, inputs], which takes the part in plain numbers."""
    matrix = form.matrix(part, target.shape[0], target.shape[1])

    def fill(*stored: Tensor) -> None:
        plain = matrix.dequantise(*stored)
        if part.order is not None:
            plain = plain.index_select(0, part.order.to(plain.device))
        target.copy_(plain)

    return filled_weight(target, matrix.slices, fill, matrix.beside)


def filled_weight(
    target: Tensor,
    slices: tuple[TensorSlice, ...],
    fill: Callable[..., None],
    beside: tuple[str, ...] = (),
) -> CheckpointWeight:
    """Returns the source of `target`, of any shape, which `fill` computes from the slices.
    `beside`: names of tensors that may be there and are not read."""
    first, *others = slices
    return CheckpointWeight(
        first.name,
        target,
        first.shape,
        first.dim,
        first.start,
        stored=first.stored,
        companions=tuple(others),
        count=first.count,
        index=first.index,
        fill=fill,
        beside=beside,
    )


def matrix_weight(form: WeightFormat | None, target: Tensor, part: LinearPart) -> CheckpointWeight:
    """Returns the source of a plain parameter [outputs, inputs], however the checkpoint has it."""
    if form is not None:
        return dequantised_weight(target, part, form)
    name = part.prefix + ".weight"
    return CheckpointWeight(name, target, part.shape, part.dim, part.start, part.order)


class Dequantised(Wrapped):
    """Computes with plain weights, as another method does: on CPU, and wherever a kernel does not
    take the shape."""

    def __init__(self, inner: LinearMethod, form: WeightFormat) -> None:
        super().__init__(inner, 0)
        self.form = form

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        yield dequantised_weight(layer.weight[part.rows], part, self.form)
        yield from bias_weights(layer, part)
