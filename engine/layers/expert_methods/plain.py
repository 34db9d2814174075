"""Experts in the model's own dtype."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.layers.expert_methods.base import ExpertLayer, ExpertMethod, ExpertPart
from engine.layers.expert_methods.stacked import plain_weights
from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.weight_format import WeightFormat, matrix_weight
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops


class PlainExperts(ExpertMethod):
    """Holds `w13` [E, 2 I, H], gate before up, or up alone [E, I, H], and `w2` [E, H, I].

    Args:
        form: How the checkpoint has each expert's matrices; None: plainly.
    """

    def __init__(self, form: WeightFormat | None = None) -> None:
        self.form = form

    def create(self, layer: ExpertLayer, shard: Shard) -> None:
        sizes = layer.sizes
        layer.w13 = shard.parameter(sizes.count, sizes.rows13, sizes.hidden)
        layer.w2 = shard.parameter(sizes.count, sizes.hidden, sizes.width)

    def checkpoint_weights(
        self, layer: ExpertLayer, part: ExpertPart
    ) -> Iterator[CheckpointWeight]:
        source = LinearPart(part.prefix, *slice_of(layer, part))
        yield matrix_weight(self.form, target_of(layer, part), source)

    def stacked_weights(self, layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
        if self.form is not None:
            return super().stacked_weights(layer, prefix)
        return plain_weights(layer, prefix)

    def apply(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        summed: bool = True,
    ) -> Tensor:
        return ops.fused_experts(
            x,
            layer.w13,
            layer.w2,
            weights,
            experts,
            layer.fixed_order,
            layer.b13,
            layer.b2,
            layer.gate,
            summed,
            layer.sizes.ranks,
        )

    def takes_beside(self, layer: ExpertLayer) -> bool:
        return not layer.fixed_order and layer.b13 is None and layer.b2 is None

    def apply_beside(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        shared: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        return ops.experts_beside(x, layer.w13, layer.w2, weights, experts, *shared, layer.gate)


def target_of(layer: ExpertLayer, part: ExpertPart) -> Tensor:
    """Returns the rows of `w13` [width, H], or the expert of `w2` [H, width], that hold one
    projection."""
    if part.projection == "down":
        return layer.w2[part.expert]
    start = layer.sizes.rows13 - layer.sizes.width if part.projection == "up" else 0
    return layer.w13[part.expert].narrow(0, start, layer.sizes.width)


def slice_of(layer: ExpertLayer, part: ExpertPart) -> tuple[tuple[int, int], int, int]:
    """Returns (shape, dim, start) of one projection in the checkpoint, as `CheckpointWeight` has
    them."""
    sizes = layer.sizes
    if part.projection == "down":
        return (sizes.hidden, sizes.whole), 1, sizes.start
    return (sizes.whole, sizes.hidden), 0, sizes.start
