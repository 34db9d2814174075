"""Experts whose weights stay int8, with a scale for each output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.expert_methods.base import ExpertLayer, ExpertMethod, ExpertPart
from engine.layers.expert_methods.plain import slice_of, target_of
from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.integer_format import IntegerFormat
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.methods.quantised.int8_linear import signed
from engine.layers.shard import CheckpointWeight, Shard
from engine.quantization import Int8Scheme
from tandem_kernels import ops


def int8_experts(scheme: Int8Scheme, shard: Shard) -> ExpertMethod | None:
    """Returns the method for experts on this rank; None: they are dequantised as they are loaded.
    That is where there is no kernel, and where scales are of groups of inputs, inputs are smoothed,
    or there are zero points."""
    if shard.gemms.int8_rows == 0 or scheme.group_size > 0 or not scheme.symmetric:
        return None
    return None if scheme.smoothed else Int8Experts(scheme)


class Int8Experts(ExpertMethod):
    """Holds `w13` [E, 2 I, H], gate before up, and `w2` [E, H, I] in int8, and scales `s13`
    [E, 2 I] and `s2` [E, H]."""

    def __init__(self, scheme: Int8Scheme) -> None:
        self.form = IntegerFormat(scheme)
        self.quantises = scheme.activations != "none"

    def create(self, layer: ExpertLayer, shard: Shard) -> None:
        count, hidden, width = layer.sizes.count, layer.sizes.hidden, layer.sizes.width
        layer.w13 = shard.parameter(count, 2 * width, hidden, dtype=torch.int8)
        layer.w2 = shard.parameter(count, hidden, width, dtype=torch.int8)
        layer.s13 = shard.parameter(count, 2 * width, dtype=torch.float32)
        layer.s2 = shard.parameter(count, hidden, dtype=torch.float32)

    def checkpoint_weights(
        self, layer: ExpertLayer, part: ExpertPart
    ) -> Iterator[CheckpointWeight]:
        numbers, scales = target_of(layer, part), _scales_of(layer, part)
        source = LinearPart(part.prefix, *slice_of(layer, part))
        slices, read = self.form.quantised_matrix(source, *numbers.shape)

        def fill(*stored: Tensor) -> None:
            matrix = read(*stored)
            numbers.copy_(signed(matrix))
            scales.copy_(matrix.scales.view(-1))

        yield filled_weight(numbers, slices, fill, self.form.beside(part.prefix))

    def apply(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        summed: bool = True,
    ) -> Tensor:
        first, second = (layer.w13, layer.s13), (layer.w2, layer.s2)
        fixed, ranks = layer.fixed_order, layer.sizes.ranks
        return ops.int8_experts(
            x, *first, *second, weights, experts, self.quantises, fixed, summed, ranks
        )


def _scales_of(layer: ExpertLayer, part: ExpertPart) -> Tensor:
    """Returns the scales of the outputs of one projection."""
    if part.projection == "down":
        return layer.s2[part.expert]
    start = layer.sizes.width if part.projection == "up" else 0
    return layer.s13[part.expert].narrow(0, start, layer.sizes.width)
