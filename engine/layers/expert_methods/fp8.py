"""Experts whose weights stay FP8, on GPUs that multiply it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.expert_methods.base import ExpertLayer, ExpertMethod, ExpertPart
from engine.layers.expert_methods.plain import slice_of
from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.fp8_format import Fp8Format
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.shard import CheckpointWeight, Shard
from engine.quantization import Fp8Scheme
from tandem_kernels import ops
from tandem_kernels.device import has_e4m3
from tandem_kernels.reference.fp8 import GROUP, quantise_fp8

_E4M3 = torch.float8_e4m3fn


def fp8_experts(scheme: Fp8Scheme, shard: Shard) -> ExpertMethod | None:
    """Returns the method for experts on this rank; None: they are dequantised as they are loaded.
    That is where there is no kernel, and where blocks are not of 128 x 128."""
    if not has_e4m3(shard.device) or shard.dtype.itemsize != 2:
        return None
    if scheme.scales == "block" and scheme.block != (GROUP, GROUP):
        return None
    return Fp8Experts(scheme)


class Fp8Experts(ExpertMethod):
    """Holds `w13` [E, 2, I, H], gate before up, and `w2` [E, H, I] in e4m3; scales for each block
    are `s13` [E, 2, I / 128, H / 128] and `s2` [E, H / 128, I / 128], else for each output
    [E, 2, I] and [E, H].

    Inputs have scales of their own for each token and 128 numbers, whatever the checkpoint says:
    none of its schemes is finer.
    """

    def __init__(self, scheme: Fp8Scheme) -> None:
        self.scheme = scheme
        self.has_blocks = scheme.scales == "block"
        self.unit = GROUP if self.has_blocks else 1

    def create(self, layer: ExpertLayer, shard: Shard) -> None:
        count, hidden, width = layer.sizes.count, layer.sizes.hidden, layer.sizes.width
        layer.w13 = shard.parameter(count, 2, width, hidden, dtype=_E4M3)
        layer.w2 = shard.parameter(count, hidden, width, dtype=_E4M3)
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = (2, width), (hidden,)
        if self.has_blocks:
            of_hidden, of_width = -(-hidden // GROUP), -(-width // GROUP)
            shapes = (2, of_width, of_hidden), (of_hidden, of_width)
        layer.s13, layer.s2 = (
            shard.parameter(count, *shape, dtype=torch.float32) for shape in shapes
        )

    def checkpoint_weights(
        self, layer: ExpertLayer, part: ExpertPart
    ) -> Iterator[CheckpointWeight]:
        if part.projection == "down":
            numbers, scales = layer.w2[part.expert], layer.s2[part.expert]
        else:
            side = int(part.projection == "up")
            numbers, scales = layer.w13[part.expert, side], layer.s13[part.expert, side]
        source = LinearPart(part.prefix, *slice_of(layer, part))
        matrix = Fp8Format(self.scheme).matrix(source, *numbers.shape)

        def fill(stored: Tensor, *more: Tensor) -> None:
            if self.scheme.online:
                whole, of_outputs = quantise_fp8(stored)
                stored = whole.narrow(source.dim, source.start, numbers.shape[source.dim])
                first = source.start if source.dim == 0 else 0
                more = (of_outputs[0, first : first + len(scales)],)
            numbers.copy_(stored)
            scales.copy_(more[0] if self.has_blocks else more[0].reshape(-1))

        yield filled_weight(numbers, matrix.slices, fill)

    def apply(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        summed: bool = True,
    ) -> Tensor:
        return ops.fp8_experts(
            x,
            layer.w13,
            layer.s13,
            layer.w2,
            layer.s2,
            weights,
            experts,
            layer.fixed_order,
            layer.b13,
            layer.b2,
            layer.gate,
            summed,
            layer.sizes.ranks,
        )
