"""Experts whose weights stay four-bit floats, on GPUs that unpack them in registers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.layers.expert_methods.base import ExpertLayer, ExpertMethod, ExpertPart
from engine.layers.expert_methods.plain import slice_of
from engine.layers.expert_methods.stacked import StoredMxfp4, check_whole_blocks
from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.fp4_format import Fp4Matrix, fp4_format
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.methods.quantised.fp4_tiling import fill_tiles, tile_words
from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.shard import CheckpointWeight, Shard
from engine.quantization import Mxfp4Scheme, Nvfp4Scheme
from tandem_kernels import ops
from tandem_kernels.device import gpu_name, multiplies_halves
from tandem_kernels.experts.expert_tuning import ExpertShape
from tandem_kernels.experts.fp4.pair_shapes import format_of, fp4_pair_tunings, sums_itself
from tandem_kernels.gemm.fp4_tiles import SIDE, tiles_of


def fp4_experts(scheme: Mxfp4Scheme | Nvfp4Scheme, shard: Shard) -> ExpertMethod | None:
    """Returns the method for experts on this rank; None: they are dequantised as they are loaded,
    where there is no kernel, and where inputs are multiplied by numbers of their own first."""
    if not multiplies_halves(shard.device) or shard.dtype.itemsize != 2:
        return None
    if isinstance(scheme, Nvfp4Scheme) and scheme.smoothed:
        return None
    return Fp4Experts(scheme)


class Fp4Experts(ExpertMethod):
    """Holds tiles (`tandem_kernels.gemm.fp4_tiles`) of gates and ups, `w13` [E, 2, ...], and of
    down projections, `w2` [E, ...], and the factors of NVFP4, `f13` [E, 2] and `f2` [E]. One expert
    at a time is there in both forms.
    """

    unit = SIDE
    """Ranks cut between tiles, and with them between groups."""

    def __init__(self, scheme: Mxfp4Scheme | Nvfp4Scheme) -> None:
        self.scheme = scheme
        self.form = fp4_format(scheme)

    def create(self, layer: ExpertLayer, shard: Shard) -> None:
        sizes, words = layer.sizes, tile_words(self.scheme)
        layer.w13, layer.w2 = (
            shard.parameter(sizes.count, *shape, dtype=torch.int32)
            for shape in (
                (2, *tiles_of(sizes.width, sizes.hidden, words)),
                tiles_of(sizes.hidden, sizes.width, words),
            )
        )
        layer.f13 = layer.f2 = None
        if isinstance(self.scheme, Nvfp4Scheme):
            layer.f13 = shard.parameter(sizes.count, 2, dtype=torch.float32)
            layer.f2 = shard.parameter(sizes.count, dtype=torch.float32)

    def checkpoint_weights(
        self, layer: ExpertLayer, part: ExpertPart
    ) -> Iterator[CheckpointWeight]:
        sizes = layer.sizes
        if self.form is None:
            raise UnsupportedScheme(
                f"{part.prefix} is quantised as MXFP4 by itself, but config.json has the method of "
                "gpt-oss, whose tensors are of all experts: use another checkpoint of the model"
            )
        for size in (sizes.hidden, sizes.whole):
            if size % self.form.group:
                raise UnsupportedScheme(
                    f"{part.prefix} is quantised in groups of {self.form.group}, but {size} inputs "
                    "are no whole groups: use another checkpoint of the model"
                )
        if part.projection == "down":
            tiles, factors, count = layer.w2[part.expert], layer.f2, sizes.hidden
            factor = None if factors is None else factors[part.expert]
            num_inputs = sizes.width
        else:
            side = int(part.projection == "up")
            tiles, factors, count = layer.w13[part.expert, side], layer.f13, sizes.width
            factor = None if factors is None else factors[part.expert, side]
            num_inputs = sizes.hidden
        source = LinearPart(part.prefix, *slice_of(layer, part))
        slices, read = self.form.quantised_matrix(source, count, num_inputs)

        def fill(*stored: Tensor) -> None:
            fill_tiles(part.prefix, tiles, factor, read(*stored))

        yield filled_weight(tiles, slices, fill, self.form.beside(part.prefix))

    def stacked_weights(self, layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
        if self.form is not None:
            yield from super().stacked_weights(layer, prefix)
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
            layer.f13,
            layer.f2,
            layer.sizes.ranks,
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
            f13=layer.f13,
            f2=layer.f2,
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
    """Fills tiles of blocks [N, K / 32, 16] whose exponents have this name."""
    fill_tiles(name, target, None, Fp4Matrix(blocks.flatten(1), exponents))
