"""Reads weights of 4 and 8 bits as they are published.

A weight is (number - zero) * scale of its group of inputs. Words of n numbers hold them from the
lowest bits on unless `order` says otherwise; beside `int-quantized`, ModelOpt and one form of Quark,
whose numbers are signed, they lie from 0 on.

| | numbers | zeros | scales |
|---|---|---|---|
| AWQ | qweight [in, out / n] | qzeros [groups, out / n] | scales [groups, out] |
| GPTQ | qweight [in / n, out] | qzeros [groups, out / n] | scales [groups, out] |
| compressed-tensors | weight_packed [out, in / n] | weight_zero_point [out / n, groups] | weight_scale [out, groups] |
| `int-quantized` | weight [out, in] int8 | weight_zero_point [out, groups] int8 | weight_scale [out, groups] |
| ModelOpt, 4 bits | weight [out / 2, in] uint8 | | weight_scale [out, groups] |
| Quark, 4 bits | weight [in, out / n] | weight_zero_point [groups, out / n] | weight_scale [groups, out] |

Sources: Lin et al., AWQ (arXiv 2306.00978), packed as AutoAWQ does; Frantar et al., GPTQ (arXiv
2210.17323), packed as AutoGPTQ does; Xiao et al., SmoothQuant (arXiv 2211.10438) for smoothing.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.packed_numbers import INT32, StoredNumbers
from engine.layers.methods.formats.weight_format import StoredMatrix, WeightFormat
from engine.layers.shard import FLOATS, TensorSlice
from engine.quantization import IntegerLayout, IntegerScheme

_DUMMY_SCALES = {4: 0.003, 8: 0.0003}
"""Random numbers, at 4 bits random zeros, too, then give weights with the deviation of other dummy
weights."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_SMOOTHING = "pre_quant_scale"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Describes all tensors of a matrix.

    Attributes:
        groups: Suffix of the list of each input's group, where inputs are ordered by activation.
        zeros_if_symmetric: Zeros are stored where they are all the same, too.
        beside: Suffixes of tensors that may be there and say nothing that we need.
    """

    numbers: StoredNumbers
    zeros: StoredNumbers
    scales: StoredNumbers
    groups: str = "g_idx"
    zeros_if_symmetric: bool = False
    beside: tuple[str, ...] = ()


_SCALES = StoredNumbers("weight_scale", "floats")
_TURNED_SCALES = StoredNumbers("scales", "floats", transposed=True)
_OF_INPUTS = ("input_scale", "input_zero_point")


def _quark(*, is_signed: bool) -> _Layout:
    return _Layout(
        StoredNumbers("weight", "I32", True, "outputs", is_signed, _AWQ_ORDER),
        StoredNumbers("weight_zero_point", "I32", True, "outputs", is_signed, _AWQ_ORDER),
        StoredNumbers("weight_scale", "floats", transposed=True),
        beside=("weight_zero_point", *_OF_INPUTS),
    )


_LAYOUTS: dict[IntegerLayout, _Layout] = {
    "awq": _Layout(
        StoredNumbers("qweight", transposed=True, packed="outputs", order=_AWQ_ORDER),
        StoredNumbers("qzeros", transposed=True, packed="outputs", order=_AWQ_ORDER),
        _TURNED_SCALES,
        zeros_if_symmetric=True,
    ),
    "gptq": _Layout(
        StoredNumbers("qweight", transposed=True, packed="inputs"),
        StoredNumbers("qzeros", transposed=True, packed="outputs"),
        _TURNED_SCALES,
        zeros_if_symmetric=True,
        beside=("g_idx", "bias"),
    ),
    "compressed-tensors": _Layout(
        StoredNumbers("weight_packed", packed="inputs"),
        StoredNumbers("weight_zero_point", packed="outputs"),
        _SCALES,
        groups="weight_g_idx",
        beside=("weight_shape", "weight_g_idx", "weight_zero_point", *_OF_INPUTS),
    ),
    "int-quantized": _Layout(
        StoredNumbers("weight", "I8", is_signed=True),
        StoredNumbers("weight_zero_point", "I8", is_signed=True),
        _SCALES,
        groups="weight_g_idx",
        beside=("weight_g_idx", "weight_zero_point", *_OF_INPUTS),
    ),
    "modelopt": _Layout(
        StoredNumbers("weight", "U8", packed="outputs", is_signed=True),
        StoredNumbers("weight_zero_point", "I8", is_signed=True),
        _SCALES,
        beside=("weight_scale_2", *_OF_INPUTS),
    ),
    "quark": _quark(is_signed=False),
    "quark-signed": _quark(is_signed=True),
}


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A part of a matrix, N outputs by K inputs.

    Attributes:
        numbers: [N, K] uint8.
        scales: [N, G], as stored.
        zeros: [N, G] uint8.
        group_of: [K] int64, the group of each input.
        factors: [K] of each input, as stored, or None: 1.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    factors: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Returns the weights in float32, [N, K]."""
        weights = self.numbers.float() - self.zeros.float()[:, self.group_of]
        weights.mul_(self.scales.float()[:, self.group_of])
        return weights if self.factors is None else weights.mul_(self.factors.float().view(-1))

    def in_output_order(self, order: Tensor | None) -> IntegerMatrix:
        """Returns the matrix with its outputs in the order [N] int64 of `LinearPart.order`."""
        if order is None:
            return self
        order = order.to(self.numbers.device)
        numbers, scales, zeros = (part[order] for part in (self.numbers, self.scales, self.zeros))
        return replace(self, numbers=numbers, scales=scales, zeros=zeros)


Reader = Callable[..., IntegerMatrix]


class IntegerFormat(WeightFormat):
    """Reads the layout of a scheme."""

    def __init__(self, scheme: IntegerScheme) -> None:
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
    ) -> tuple[tuple[TensorSlice, ...], Reader]:
        """Returns the slices of the checkpoint that a part [num_outputs, num_inputs] needs, and
        the function that makes an `IntegerMatrix` of them."""
        layout, scheme, bits, total = self.layout, self.scheme, self.scheme.bits, part.shape[1]
        group_size = scheme.group_size if scheme.group_size > 0 else total
        starts = (part.start, 0) if part.dim == 0 else (0, part.start)
        counts = num_outputs, num_inputs
        first_group, end_group = starts[1] // group_size, -(-(starts[1] + counts[1]) // group_size)
        num_groups = -(-total // group_size)
        if scheme.ordered_by_activation:
            first_group, end_group = 0, num_groups
        groups = (
            (part.shape[0], num_groups),
            (starts[0], first_group),
            (counts[0], end_group - first_group),
        )
        slices = [
            layout.numbers.slice_of(part.prefix, part.shape, starts, counts, bits),
            self._of_groups(layout.scales, part.prefix, *groups),
        ]
        has_zeros = layout.zeros_if_symmetric or not scheme.symmetric
        if has_zeros:
            slices.append(self._of_groups(layout.zeros, part.prefix, *groups))
        if scheme.ordered_by_activation:
            slices.append(_of_inputs(part, layout.groups, counts[1], INT32))
        if scheme.smoothed:
            slices.append(_of_inputs(part, _SMOOTHING, counts[1]))

        def read(numbers: Tensor, scales: Tensor, *others: Tensor) -> IntegerMatrix:
            more = iter(others)
            scales = self._read_of_groups(layout.scales, scales, *groups[1:])
            if has_zeros:
                zeros = self._read_of_groups(layout.zeros, next(more), *groups[1:])
                zeros = zeros + scheme.zeros_are_less_by & (1 << bits) - 1
            else:
                zeros = torch.full(scales.shape, 1 << bits - 1, device=numbers.device)
            if scheme.ordered_by_activation:
                group_of = next(more).long()
            else:
                inputs = torch.arange(starts[1], starts[1] + counts[1], device=numbers.device)
                group_of = inputs // group_size - first_group
            numbers = layout.numbers.read(numbers, starts, counts, bits)
            return IntegerMatrix(numbers, scales, zeros.byte(), group_of, next(more, None))

        return tuple(slices), read

    def _of_groups(
        self,
        stored: StoredNumbers,
        prefix: str,
        shape: tuple[int, int],
        starts: tuple[int, int],
        counts: tuple[int, int],
    ) -> TensorSlice:
        dummy = _DUMMY_SCALES[self.scheme.bits] if stored is self.layout.scales else None
        part = stored.slice_of(prefix, shape, starts, counts, self.scheme.bits, dummy)
        if self.scheme.group_size == 0:
            return TensorSlice(part.name, (), stored=part.stored, dummy=dummy)
        return part

    def _read_of_groups(
        self, stored: StoredNumbers, part: Tensor, starts: tuple[int, int], counts: tuple[int, int]
    ) -> Tensor:
        if self.scheme.group_size == 0:
            part = part.view(1, 1).expand(counts)
        elif part.dim() < 2:
            # Scales of outputs may lack the other dimension.
            part = part.unsqueeze(1)
        return stored.read(part, starts, counts, self.scheme.bits)


def _of_inputs(
    part: LinearPart, suffix: str, count: int, stored: frozenset[str] | None = None
) -> TensorSlice:
    """Returns the slice of a tensor that has a number for each input; without `stored`, of one that
    some layers lack."""
    is_cut, is_optional = part.dim == 1, stored is None
    return TensorSlice(
        f"{part.prefix}.{suffix}",
        part.shape[1:],
        0 if is_cut else None,
        part.start if is_cut else 0,
        count if is_cut else 0,
        stored or FLOATS,
        dummy=1.0 if is_optional else None,
        is_optional=is_optional,
    )
