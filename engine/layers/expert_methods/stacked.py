"""Reads checkpoints that have the tensors of all experts of a layer in one, as gpt-oss' do:

    gate_up_proj        [E, H, 2 I]             down_proj        [E, I, H]
    gate_up_proj_bias   [E, 2 I]                down_proj_bias   [E, H]

or, in MXFP4, [E, 2 I, H / 32, 16] and [E, H, I / 32, 16] with exponents beside them. Gate and up
take turns. Experts are read one by one, each rank its own units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.expert_methods.base import ExpertLayer, ExpertSizes
from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.shard import CheckpointWeight, TensorSlice, nothing_of
from tandem_kernels.reference.mxfp4 import BLOCK, BLOCK_BYTES, dequantise_mxfp4

STACKED_NAMES = ("gate_up_proj", "down_proj")
BYTES = frozenset({"U8"})
DUMMY_EXPONENT = 120.0
"""Makes dummy numbers of 4 bits about as large as others are."""


def plain_weights(layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
    """Yields the sources of `w13` and `w2`, where the checkpoint has plain numbers."""
    sizes = layer.sizes
    for own, expert in enumerate(sizes.held):
        w13, w2 = layer.w13[own], layer.w2[own]
        yield CheckpointWeight(
            f"{prefix}.gate_up_proj",
            w13,
            (sizes.total, sizes.hidden, 2 * sizes.whole),
            1,
            2 * sizes.start,
            count=2 * sizes.width,
            index=expert,
            fill=lambda stored, to=w13: fill_turns(to, stored.t()),
        )
        yield CheckpointWeight(
            f"{prefix}.down_proj",
            w2,
            (sizes.total, sizes.whole, sizes.hidden),
            0,
            sizes.start,
            count=sizes.width,
            index=expert,
            fill=lambda stored, to=w2: to.copy_(stored.t()),
        )


def mxfp4_weights(layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
    """Yields the sources of plain `w13` and `w2`, where the checkpoint has MXFP4. A rank's units
    may begin inside a block."""
    sizes = layer.sizes
    stored = StoredMxfp4(prefix, sizes)
    for own, expert in enumerate(sizes.held):
        w13, w2 = layer.w13[own], layer.w2[own]

        def fill_up(blocks: Tensor, scales: Tensor, to: Tensor = w13) -> None:
            fill_turns(to, dequantise_mxfp4(blocks, scales, to.dtype))

        def fill_down(blocks: Tensor, scales: Tensor, to: Tensor = w2) -> None:
            inputs = dequantise_mxfp4(blocks, scales, to.dtype)
            to.copy_(inputs.narrow(1, sizes.start % BLOCK, sizes.width))

        for (blocks, scales), target, fill in (
            (stored.gate_up(expert), w13, fill_up),
            (stored.down(expert), w2, fill_down),
        ):
            yield CheckpointWeight(
                blocks.name,
                target,
                blocks.shape,
                blocks.dim,
                blocks.start,
                stored=blocks.stored,
                companions=(scales,),
                count=blocks.count,
                index=expert,
                fill=fill,
            )


@dataclass(frozen=True, slots=True)
class StoredMxfp4:
    """Knows which slices of a checkpoint are a rank's units of an expert in MXFP4.

    Attributes:
        prefix: The checkpoint's name of the layer's experts.
    """

    prefix: str
    sizes: ExpertSizes

    def gate_up(self, expert: int) -> tuple[TensorSlice, TensorSlice]:
        """Returns blocks [2 width, H / 32, 16] and exponents [2 width, H / 32], whose rows are gate
        and up in turns."""
        sizes = self.sizes
        rows = 2 * sizes.start, 2 * sizes.width
        return self._slices("gate_up_proj", 2 * sizes.whole, sizes.hidden, expert, 0, *rows)

    def down(self, expert: int) -> tuple[TensorSlice, TensorSlice]:
        """Returns blocks [H, n, 16] and exponents [H, n] of all blocks that hold some of the
        rank's units."""
        sizes = self.sizes
        first, end = sizes.start // BLOCK, -(-(sizes.start + sizes.width) // BLOCK)
        return self._slices("down_proj", sizes.hidden, sizes.whole, expert, 1, first, end - first)

    def _slices(
        self, name: str, outputs: int, inputs: int, expert: int, dim: int, start: int, count: int
    ) -> tuple[TensorSlice, TensorSlice]:
        shape = self.sizes.total, outputs, inputs // BLOCK
        blocks = TensorSlice(
            f"{self.prefix}.{name}_blocks", (*shape, BLOCK_BYTES), dim, start, count, BYTES,
            index=expert,
        )  # fmt: skip
        scales = TensorSlice(
            f"{self.prefix}.{name}_scales", shape, dim, start, count, BYTES, DUMMY_EXPONENT,
            index=expert,
        )  # fmt: skip
        return blocks, scales


def check_whole_blocks(layer: ExpertLayer, prefix: str) -> None:
    """Raises `UnsupportedScheme` where experts are no whole blocks of MXFP4."""
    for size in (layer.sizes.hidden, layer.sizes.whole):
        if size % BLOCK:
            raise UnsupportedScheme(
                f"{prefix} is quantised as MXFP4, but {size} inputs are no whole blocks of "
                f"{BLOCK}: use another checkpoint of the model"
            )


def bias_weights(layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
    """Yields the sources of the biases. Of slices only the first rank has the second."""
    sizes, b13, b2 = layer.sizes, layer.b13, layer.b2
    assert b13 is not None
    first, second = f"{prefix}.gate_up_proj_bias", f"{prefix}.down_proj_bias"
    for own, expert in enumerate(sizes.held):
        yield CheckpointWeight(
            first,
            b13[own],
            (sizes.total, 2 * sizes.whole),
            0,
            2 * sizes.start,
            count=2 * sizes.width,
            index=expert,
            fill=lambda stored, to=b13[own]: fill_turns(to, stored),
        )
    shape = sizes.total, sizes.hidden
    if b2 is None:
        yield nothing_of(second, shape)
        return
    for own, expert in enumerate(sizes.held):
        yield CheckpointWeight(second, b2[own], shape, index=expert)


def fill_turns(target: Tensor, stored: Tensor) -> None:
    """Fills `target` [2 n, ...], all gates, then all ups, from `stored` of that shape, whose rows
    are gate and up in turns."""
    gates, ups = torch.chunk(target, 2)
    gates.copy_(stored[0::2])
    ups.copy_(stored[1::2])
