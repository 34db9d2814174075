"""Computes linear layers with four-bit floats, which stay so in memory.

Both NVFP4 and MXFP4 become tiles (`tandem_kernels.gemm.fp4_tiles`), part by part as they are
loaded. Few rows are multiplied by a kernel that unpacks in registers; for many, a layer's weights
are written out in half precision and multiplied as plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import (
    LinearLayer,
    LinearMethod,
    LinearPart,
    LinearShare,
    bias_weights,
)
from engine.layers.methods.formats.fp4_format import Fp4Format, fp4_format
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.methods.quantised.fp4_tiling import fill_tiles, tile_words
from engine.layers.methods.quantised.written_out import written_out
from engine.layers.shard import CheckpointWeight, Shard
from engine.parallel.distributed import ParallelGroup
from engine.quantization import Mxfp4Scheme, Nvfp4Scheme
from tandem_kernels import ops
from tandem_kernels.gemm.fp4_tiles import SIDE, tiles_of


def fp4_linear(
    scheme: Nvfp4Scheme | Mxfp4Scheme, plain: LinearMethod, share: LinearShare, policy: GemmPolicy
) -> LinearMethod | None:
    """Returns the method of a layer; None: it is dequantised as it is loaded. That is where there
    is no kernel, where outputs of a part are no whole tiles, where ranks cut groups, and where
    inputs are multiplied by numbers of their own first."""
    form = fp4_format(scheme)
    if policy.fp4_rows == 0 or form is None or form.is_smoothed:
        return None
    if any(part.count % SIDE for part in share.outputs):
        return None
    if any(edge % form.group for edge in (*share.inputs, share.total_inputs)):
        return None
    return Fp4Linear(plain, form, policy)


class Fp4Linear(LinearMethod):
    """Holds `tiles` and `factors` as the kernels want them.

    Args:
        plain: Computes many rows, of weights that are written out.
    """

    def __init__(self, plain: LinearMethod, form: Fp4Format, policy: GemmPolicy) -> None:
        self.plain = plain
        self.form = form
        self.rows = policy.fp4_rows
        self.residual_rows = policy.residual_rows
        self.fixed_order = policy.deterministic

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        words = tile_words(self.form.scheme)
        layer.tiles = shard.parameter(*tiles_of(num_outputs, num_inputs, words), dtype=torch.int32)
        layer.factors = None
        if isinstance(self.form.scheme, Nvfp4Scheme):
            layer.factors = shard.parameter(num_outputs, dtype=torch.float32)
        layer.bias = shard.parameter(num_outputs) if bias else None

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        start, stop, _ = part.rows.indices(len(layer.tiles) * SIDE)
        tiles = layer.tiles[start // SIDE : stop // SIDE]
        factors = None if layer.factors is None else layer.factors[start:stop]
        slices, read = self.form.quantised_matrix(part, stop - start, layer.share.inputs[1])

        def fill(*stored: Tensor) -> None:
            fill_tiles(part.prefix, tiles, factors, read(*stored).in_output_order(part.order))

        yield filled_weight(tiles, slices, fill, self.form.beside(part.prefix))
        yield from bias_weights(layer, part)

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self._from_tiles(x):
            return ops.fp4_gemm(x, layer.tiles, layer.factors, layer.bias, self.fixed_order)
        return self.plain.apply(self._written_out(layer, x), x)

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self._from_tiles(x):
            return ops.fp4_gate_up(x, layer.tiles, layer.factors, self.fixed_order)
        return self.plain.gate_up(self._written_out(layer, x), x)

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        if self._from_tiles(x) or not 0 < self.residual_rows <= len(x):
            return False
        return self.plain.add_to(self._written_out(layer, x), x, residual)

    def reduce(self, local: Tensor, group: ParallelGroup) -> Tensor:
        return self.plain.reduce(local, group)

    def _from_tiles(self, x: Tensor) -> bool:
        return self.fixed_order or len(x) <= self.rows

    @staticmethod
    def _written_out(layer: LinearLayer, x: Tensor) -> LinearLayer:
        """Returns what methods of plain weights read of a layer."""
        weight = ops.fp4_dequantise(layer.tiles, layer.factors, x.shape[1], x.dtype)
        return written_out(weight, layer.bias)
