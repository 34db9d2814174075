"""Experts with 4-bit weights, which stay packed in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.expert_methods.base import ExpertLayer, ExpertMethod, ExpertPart
from engine.layers.expert_methods.plain import slice_of
from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.integer_format import IntegerFormat
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.methods.quantised.int4_linear import pack_into
from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.shard import CheckpointWeight, Shard
from engine.quantization import Int4Scheme
from tandem_kernels import ops
from tandem_kernels.gemm.int4_packing import GROUP_SIZES, group_size_for, padded_inputs


def int4_experts(scheme: Int4Scheme, shard: Shard) -> ExpertMethod | None:
    """Returns the method for experts on this rank; None: they are dequantised as they are loaded.
    That is where there is no kernel, and where inputs are smoothed, or ordered by activation: each
    expert has an order of its own."""
    if shard.gemms.int4_rows == 0 or scheme.ordered_by_activation or scheme.smoothed:
        return None
    return Int4Experts(IntegerFormat(scheme))


class Int4Experts(ExpertMethod):
    """Holds `packed13` [E, 2 I, H' / 4], gate before up, `packed2` [E, H, I' / 4], and their groups
    (`tandem_kernels.gemm.int4_packing`)."""

    unit = min(GROUP_SIZES)
    """Ranks cut the inputs of the down projection where a group may begin."""

    def __init__(self, form: IntegerFormat) -> None:
        self.form = form

    def create(self, layer: ExpertLayer, shard: Shard) -> None:
        sizes = layer.sizes
        inputs = sizes.hidden, math.gcd(sizes.start, sizes.width)
        group_sizes = [group_size_for(max(0, self.form.scheme.group_size), n) for n in inputs]
        shapes = (2 * sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
        created = []
        for group_size, (num_outputs, num_inputs) in zip(group_sizes, shapes, strict=True):
            if group_size is None:
                raise UnsupportedScheme(
                    f"{shard.prefix} has experts with 4-bit weights in groups of "
                    f"{self.form.scheme.group_size}, hidden size {sizes.hidden} and "
                    f"{sizes.width} units on a rank: groups and sizes must be multiples of "
                    f"{self.unit}; choose fewer tensor-parallel ranks or another checkpoint"
                )
            padded = padded_inputs(num_inputs, group_size)
            packed = shard.parameter(sizes.count, num_outputs, padded // 4, dtype=torch.int16)
            groups = shard.parameter(sizes.count, padded // group_size, num_outputs, 2)
            created.append((packed, groups))
        (layer.packed13, layer.groups13), (layer.packed2, layer.groups2) = created

    def checkpoint_weights(
        self, layer: ExpertLayer, part: ExpertPart
    ) -> Iterator[CheckpointWeight]:
        packed, groups, num_inputs = _target_of(layer, part)
        source = LinearPart(part.prefix, *slice_of(layer, part))
        slices, read = self.form.quantised_matrix(source, len(packed), num_inputs)

        def fill(*stored: Tensor) -> None:
            pack_into(packed, groups, read(*stored))

        yield filled_weight(packed, slices, fill, self.form.beside(part.prefix))

    def apply(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        summed: bool = True,
    ) -> Tensor:
        first, second = (layer.packed13, layer.groups13), (layer.packed2, layer.groups2)
        return ops.int4_experts(
            x, *first, *second, weights, experts, layer.fixed_order, summed, layer.sizes.ranks
        )


def _target_of(layer: ExpertLayer, part: ExpertPart) -> tuple[Tensor, Tensor, int]:
    """Returns packed numbers and groups of one projection, and how many inputs it has."""
    sizes = layer.sizes
    if part.projection == "down":
        return layer.packed2[part.expert], layer.groups2[part.expert], sizes.width
    start = sizes.width if part.projection == "up" else 0
    packed = layer.packed13[part.expert].narrow(0, start, sizes.width)
    groups = layer.groups13[part.expert].narrow(1, start, sizes.width)
    return packed, groups, sizes.hidden
