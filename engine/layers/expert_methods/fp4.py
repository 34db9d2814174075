"""Experts whose weights stay MXFP4, on GPUs that unpack it in registers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.layers.expert_methods.base import ExpertLayer, ExpertMethod, ExpertPart
from engine.layers.expert_methods.stacked import StoredMxfp4, check_whole_blocks
from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.methods.weight_format import filled_weight
from engine.layers.shard import CheckpointWeight, Shard
from engine.quantization import Mxfp4Scheme
from tandem_kernels import ops
from tandem_kernels.device import gpu_name, multiplies_halves
from tandem_kernels.experts.expert_tuning import ExpertShape
from tandem_kernels.experts.fp4.pair_shapes import format_of, fp4_pair_tunings, sums_itself
from tandem_kernels.gemm.fp4_tiles import SIDE, tile_mxfp4, tiles_of


def fp4_experts(scheme: Mxfp4Scheme, shard: Shard) -> ExpertMethod | None:
    """Returns the method for experts on this rank; None: they are dequantised as they are loaded,
    where there is no kernel."""
    if not multiplies_halves(shard.device) or shard.dtype.itemsize != 2:
        return None
    return Fp4Experts()


class Fp4Experts(ExpertMethod):
    """Holds tiles (`tandem_kernels.gemm.fp4_tiles`) of gates and ups, `w13` [E, 2, ...], and
    of down projections, `w2` [E, ...]. One expert at a time is there in both forms.
    """

    unit = SIDE
    """Ranks cut between tiles, and with them between blocks."""

    def create(self, layer: ExpertLayer, shard: Shard) -> None:
        count, hidden, width = layer.sizes.count, layer.sizes.hidden, layer.sizes.width
        layer.w13, layer.w2 = (
            shard.parameter(count, *shape, dtype=torch.int32)
            for shape in ((2, *tiles_of(width, hidden)), tiles_of(hidden, width))
        )

    def checkpoint_weights(
        self, layer: ExpertLayer, part: ExpertPart
    ) -> Iterator[CheckpointWeight]:
        raise UnsupportedScheme(
            f"{part.prefix} is quantised as MXFP4 by itself, which is known of tensors of all "
            "experts alone: use another checkpoint of the model"
        )

    def stacked_weights(self, layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
        check_whole_blocks(layer, prefix)
        stored = StoredMxfp4(prefix, layer.sizes)
        for own, expert in enumerate(layer.sizes.held):
            w13, w2 = layer.w13[own], layer.w2[own]
            gate_up, down = stored.gate_up(expert), stored.down(expert)
            yield filled_weight(w13, gate_up, partial(_fill_turns, gate_up[1].name, w13))
            yield filled_weight(w2, down, partial(_fill, down[1].name, w2))

    def apply(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        summed: bool = True,
    ) -> Tensor:
        return ops.fp4_experts(
            x,
            layer.w13,
            layer.w2,
            layer.sizes.width,
            weights,
            experts,
            layer.fixed_order,
            layer.b13,
            layer.b2,
            layer.gate,
            summed,
        )

    def leaves_sums(self, layer: ExpertLayer, num_pairs: int) -> bool:
        gpu = gpu_name(layer.w13.device)
        return layer.fixed_order or not sums_itself(_shape(layer), num_pairs, gpu)

    def takes_logits(self, layer: ExpertLayer, num_rows: int, top_k: int) -> bool:
        gpu = gpu_name(layer.w13.device)
        return (
            layer.sizes.count == layer.sizes.total
            and not layer.fixed_order
            and fp4_pair_tunings(_shape(layer), num_rows * top_k, gpu) is not None
        )

    def add_routed(
        self,
        layer: ExpertLayer,
        x: Tensor,
        logits: Tensor,
        slot_mapping: Tensor,
        residual: Tensor,
        top_k: int,
        *,
        renormalise: bool,
        scaling: float,
    ) -> None:
        ops.fp4_routed_experts(
            x,
            logits,
            slot_mapping,
            residual,
            layer.w13,
            layer.w2,
            layer.sizes.width,
            top_k,
            renormalise=renormalise,
            scaling=scaling,
            b13=layer.b13,
            b2=layer.b2,
            gate=layer.gate,
        )


def _shape(layer: ExpertLayer) -> ExpertShape:
    """Returns the shape by which tilings are chosen."""
    return ExpertShape(
        layer.sizes.count, layer.sizes.width, layer.sizes.hidden, format_of(layer.w13)
    )


def _fill_turns(name: str, target: Tensor, blocks: Tensor, exponents: Tensor) -> None:
    """Fills the tiles of gate and up, whose rows take turns."""
    for side in (0, 1):
        _fill(name, target[side], blocks[side::2], exponents[side::2])


def _fill(name: str, target: Tensor, blocks: Tensor, exponents: Tensor) -> None:
    """Fills tiles. Raises `UnsupportedScheme` about the exponents of this name."""
    try:
        tile_mxfp4(blocks.contiguous(), exponents.contiguous(), target)
    except ValueError as error:
        raise UnsupportedScheme(
            f"{name}: {error}: weights of such a size are not supported; check that the checkpoint "
            "is complete"
        ) from error
