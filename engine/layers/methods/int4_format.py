"""Reads 4-bit weights as AWQ, GPTQ and compressed-tensors publish them.

Numbers and zero points are packed by eight into int32, along outputs or inputs, from the lowest
bits on unless `order` says otherwise. A weight is (number - zero) * scale of its group of inputs.

| | numbers | zeros | scales |
|---|---|---|---|
| AWQ | qweight [in, out / 8] | qzeros [groups, out / 8] | scales [groups, out] |
| GPTQ | qweight [in / 8, out] | qzeros [groups, out / 8] | scales [groups, out] |
| compressed-tensors | weight_packed [out, in / 8] | weight_zero_point [out / 8, groups] | weight_scale [out, groups] |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.layers.methods.base import LinearPart
from engine.layers.methods.weight_format import StoredMatrix, WeightFormat
from engine.layers.shard import FLOATS, TensorSlice
from engine.quantization import Int4Layout, Int4Scheme

INT32 = frozenset({"I32"})
SYMMETRIC_ZERO = 8
_PER_WORD = 8
_DUMMY_SCALE = 0.003
"""Random numbers and zeros then give weights with the deviation of other dummy weights."""
_IN_ORDER = tuple(range(_PER_WORD))
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Axis = Literal["outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Describes one of a matrix' tensors.

    Attributes:
        transposed: Outputs are the second dimension.
        packed: The axis along which eight share a word; None: none do.
        order: Number i of a word is in its `order[i]`-th four bits.
    """

    suffix: str
    transposed: bool
    packed: Axis | None = None
    order: tuple[int, ...] = _IN_ORDER

    def slice_of(
        self, prefix: str, shape: tuple[int, int], starts: tuple[int, int], counts: tuple[int, int]
    ) -> TensorSlice:
        """Returns the words that hold a part of a matrix of `shape`, which is cut in one axis."""
        sizes, first = list(shape), list(starts)
        last = [starts[0] + counts[0], starts[1] + counts[1]]
        if self.packed is not None:
            axis = 0 if self.packed == "outputs" else 1
            for bounds in (sizes, last):
                bounds[axis] = -(-bounds[axis] // _PER_WORD)
            first[axis] //= _PER_WORD
        cut = next((axis for axis in (0, 1) if (first[axis], last[axis]) != (0, sizes[axis])), None)
        stored = INT32 if self.packed is not None else FLOATS
        dim, start, count = None, 0, 0
        if cut is not None:
            dim, start, count = cut, first[cut], last[cut] - first[cut]
            if self.transposed:
                dim = 1 - dim
        if self.transposed:
            sizes.reverse()
        dummy = None if self.packed is not None else _DUMMY_SCALE
        return TensorSlice(
            f"{prefix}.{self.suffix}", (sizes[0], sizes[1]), dim, start, count, stored, dummy
        )

    def read(self, stored: Tensor, starts: tuple[int, int], counts: tuple[int, int]) -> Tensor:
        """Returns what the words of a slice hold, [outputs, inputs or groups]."""
        if self.transposed:
            stored = stored.t()
        if self.packed is None:
            return stored
        axis = 0 if self.packed == "outputs" else 1
        numbers = torch.empty((*stored.shape, _PER_WORD), dtype=torch.uint8, device=stored.device)
        for index, place in enumerate(self.order):
            numbers[..., index] = stored >> 4 * place & 15
        unpacked = numbers.movedim(2, axis + 1).flatten(axis, axis + 1)
        return unpacked.narrow(axis, starts[axis] % _PER_WORD, counts[axis])


@dataclass(frozen=True, slots=True)
class _Layout:
    numbers: _Stored
    zeros: _Stored
    scales: _Stored
    groups: str
    """Suffix of the list of each input's group, where inputs are ordered by activation."""
    zeros_if_symmetric: bool
    """Zeros are stored where they are all the same, too."""
    beside: tuple[str, ...] = ()
    """Suffixes of tensors that may be there and say nothing that we need."""


_LAYOUTS: dict[Int4Layout, _Layout] = {
    "awq": _Layout(
        _Stored("qweight", True, "outputs", _AWQ_ORDER),
        _Stored("qzeros", True, "outputs", _AWQ_ORDER),
        _Stored("scales", True),
        groups="g_idx",
        zeros_if_symmetric=True,
    ),
    "gptq": _Layout(
        _Stored("qweight", True, "inputs"),
        _Stored("qzeros", True, "outputs"),
        _Stored("scales", True),
        groups="g_idx",
        zeros_if_symmetric=True,
        beside=("g_idx", "bias"),
    ),
    "compressed-tensors": _Layout(
        _Stored("weight_packed", False, "inputs"),
        _Stored("weight_zero_point", False, "outputs"),
        _Stored("weight_scale", False),
        groups="weight_g_idx",
        zeros_if_symmetric=False,
        beside=("weight_shape", "weight_g_idx", "weight_zero_point"),
    ),
}


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A part of a matrix, N outputs by K inputs.

    Attributes:
        numbers: [N, K] uint8, 0..15.
        scales: [N, G], as stored.
        zeros: [N, G] uint8, 0..15.
        group_of: [K] int64, the group of each input.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def dequantised(self) -> Tensor:
        """Returns the weights in float32, [N, K]."""
        weights = self.numbers.float() - self.zeros.float()[:, self.group_of]
        return weights.mul_(self.scales.float()[:, self.group_of])


class Int4Format(WeightFormat):
    """Reads the layout of a scheme."""

    def __init__(self, scheme: Int4Scheme) -> None:
        self.scheme = scheme
        self.layout = _LAYOUTS[scheme.layout]

    def matrix(self, part: LinearPart, num_outputs: int, num_inputs: int) -> StoredMatrix:
        slices, read = self.quantised_matrix(part, num_outputs, num_inputs)
        return StoredMatrix(
            slices, lambda *stored: read(*stored).dequantised(), self.beside(part.prefix)
        )

    def beside(self, prefix: str) -> tuple[str, ...]:
        """Returns names of tensors that may be in the checkpoint beside those of a matrix."""
        return tuple(f"{prefix}.{suffix}" for suffix in self.layout.beside)

    def quantised_matrix(
        self, part: LinearPart, num_outputs: int, num_inputs: int
    ) -> tuple[tuple[TensorSlice, ...], Callable[..., Int4Matrix]]:
        """Returns what is read for a part of a matrix, and what makes an `Int4Matrix` of it."""
        layout, total_inputs = self.layout, part.shape[1]
        group_size = self.scheme.group_size if self.scheme.group_size > 0 else total_inputs
        starts = (part.start, 0) if part.dim == 0 else (0, part.start)
        counts = num_outputs, num_inputs
        first_group, end_group = starts[1] // group_size, -(-(starts[1] + counts[1]) // group_size)
        num_groups = -(-total_inputs // group_size)
        if self.scheme.ordered_by_activation:
            first_group, end_group = 0, num_groups
        group_shape = part.shape[0], num_groups
        group_cut = (starts[0], first_group), (counts[0], end_group - first_group)
        slices = [
            layout.numbers.slice_of(part.prefix, part.shape, starts, counts),
            layout.scales.slice_of(part.prefix, group_shape, *group_cut),
        ]
        has_zeros = layout.zeros_if_symmetric or not self.scheme.symmetric
        if has_zeros:
            slices.append(layout.zeros.slice_of(part.prefix, group_shape, *group_cut))
        if self.scheme.ordered_by_activation:
            name = f"{part.prefix}.{layout.groups}"
            dim = 0 if part.dim == 1 else None
            slices.append(TensorSlice(name, (total_inputs,), dim, starts[1], counts[1], INT32))

        def read(numbers: Tensor, scales: Tensor, *others: Tensor) -> Int4Matrix:
            scales = layout.scales.read(scales, *group_cut)
            if has_zeros:
                zeros = layout.zeros.read(others[0], *group_cut)
                zeros = zeros + self.scheme.zeros_are_less_by & 15
            else:
                zeros = torch.full(scales.shape, SYMMETRIC_ZERO, device=numbers.device)
            if self.scheme.ordered_by_activation:
                group_of = others[-1].long()
            else:
                inputs = torch.arange(starts[1], starts[1] + counts[1], device=numbers.device)
                group_of = inputs // group_size - first_group
            return Int4Matrix(
                layout.numbers.read(numbers, starts, counts), scales, zeros.byte(), group_of
            )

        return tuple(slices), read
