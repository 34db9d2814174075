"""Computes linear layers with 4-bit weights, which stay packed in memory.

All published layouts become one packed form (`tandem_kernels.gemm.int4_packing`), tensor by tensor
as they are loaded. Few rows are multiplied by a kernel that unpacks in registers; for many, a
layer's weights are written out in half precision and multiplied as plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.contracts.errors import CannotStartError
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import (
    LinearLayer,
    LinearMethod,
    LinearPart,
    LinearShare,
    bias_weights,
)
from engine.layers.methods.formats.integer_format import IntegerFormat, IntegerMatrix
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.methods.quantised.written_out import written_out
from engine.layers.shard import CheckpointWeight, Shard
from engine.parallel.distributed import ParallelGroup
from engine.quantization import Int4Scheme
from tandem_kernels import ops
from tandem_kernels.gemm.int4_packing import (
    group_size_for,
    pack_groups,
    pack_numbers,
    packed_group_size,
    padded_inputs,
)

_NOT_LOADED = -1


class InputOrderError(CannotStartError):
    """Inputs are ordered by activation in a way that a layer here cannot follow."""


def int4_linear(
    scheme: Int4Scheme, plain: LinearMethod, share: LinearShare, policy: GemmPolicy
) -> LinearMethod | None:
    """Returns the method of a layer; None: it is dequantised as it is loaded. That is where there
    is no kernel, where ranks cut groups in pieces of less than 32 inputs, where they cut inputs
    that are ordered by activation, and where inputs are smoothed."""
    start, count = share.inputs
    is_cut = start > 0 or count < share.total_inputs
    if policy.int4_rows == 0 or scheme.smoothed or (scheme.ordered_by_activation and is_cut):
        return None
    published = max(0, scheme.group_size)
    group_size = group_size_for(published, math.gcd(start, count))
    if group_size is None:
        return None
    return Int4Linear(plain, IntegerFormat(scheme), group_size, policy)


class Int4Linear(LinearMethod):
    """Holds `packed` and `groups` as the kernels want them.

    Args:
        plain: Computes many rows, of weights that are written out.
        group_size: Inputs that share a scale here.
    """

    def __init__(
        self, plain: LinearMethod, form: IntegerFormat, group_size: int, policy: GemmPolicy
    ) -> None:
        self.plain = plain
        self.form = form
        self.group_size = group_size
        self.rows = policy.int4_rows
        self.residual_rows = policy.residual_rows
        self.fixed_order = policy.deterministic

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        inputs = padded_inputs(num_inputs, self.group_size)
        layer.packed = shard.parameter(num_outputs, inputs // 4, dtype=torch.int16)
        layer.groups = shard.parameter(inputs // self.group_size, num_outputs, 2)
        layer.bias = shard.parameter(num_outputs) if bias else None
        layer.input_order = None
        if self.form.scheme.ordered_by_activation:
            layer.input_order = shard.parameter(num_inputs, dtype=torch.int64)
            layer.input_order.fill_(_NOT_LOADED)

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        packed, groups = layer.packed[part.rows], layer.groups[:, part.rows]
        slices, read = self.form.quantised_matrix(part, len(packed), layer.share.inputs[1])

        def fill(*stored: Tensor) -> None:
            matrix = read(*stored).in_output_order(part.order)
            if layer.input_order is not None:
                matrix = self._in_input_order(matrix, layer.input_order, part.prefix)
            pack_into(packed, groups, matrix)

        yield filled_weight(packed, slices, fill, self.form.beside(part.prefix))
        yield from bias_weights(layer, part)

    def _in_input_order(self, matrix: IntegerMatrix, order: Tensor, name: str) -> IntegerMatrix:
        """Sorts inputs by their groups; the parts of a layer must agree on the order."""
        own = matrix.group_of.argsort(stable=True)
        if order[0] == _NOT_LOADED:
            order.copy_(own)
        sorted_groups = matrix.group_of[order]
        starts = sorted_groups[:: self.group_size].repeat_interleave(self.group_size)
        if not torch.equal(sorted_groups, starts[: len(sorted_groups)]):
            raise InputOrderError(
                f"{name}.{self.form.layout.groups} does not sort inputs into whole groups as the "
                "layers beside it do (desc_act): use a checkpoint without desc_act"
            )
        numbers = matrix.numbers[:, order]
        return IntegerMatrix(numbers, matrix.scales, matrix.zeros, sorted_groups)

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        x = self._ordered(layer, x)
        if self._from_packed(x):
            return ops.int4_gemm(x, layer.packed, layer.groups, layer.bias, self.fixed_order)
        return self.plain.apply(self._written_out(layer, x), x)

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        x = self._ordered(layer, x)
        if self._from_packed(x):
            return ops.int4_gate_up(x, layer.packed, layer.groups, self.fixed_order)
        return self.plain.gate_up(self._written_out(layer, x), x)

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        if self._from_packed(x) or not 0 < self.residual_rows <= len(x):
            return False
        x = self._ordered(layer, x)
        return self.plain.add_to(self._written_out(layer, x), x, residual)

    def reduce(self, local: Tensor, group: ParallelGroup) -> Tensor:
        return self.plain.reduce(local, group)

    def _from_packed(self, x: Tensor) -> bool:
        return self.fixed_order or len(x) <= self.rows

    @staticmethod
    def _ordered(layer: LinearLayer, x: Tensor) -> Tensor:
        return x if layer.input_order is None else x.index_select(1, layer.input_order)

    @staticmethod
    def _written_out(layer: LinearLayer, x: Tensor) -> LinearLayer:
        """Returns what methods of plain weights read of a layer."""
        weight = ops.int4_dequantise(layer.packed, layer.groups, x.shape[1])
        return written_out(weight, layer.bias)


def pack_into(packed: Tensor, groups: Tensor, matrix: IntegerMatrix) -> None:
    """Fills packed weights [N, K' / 4] and their groups [K' / G, N, 2]."""
    group_size = packed_group_size(packed, groups)
    published = matrix.group_of[::group_size]
    scales, zeros = (part[:, published] for part in (matrix.scales, matrix.zeros))
    packed.copy_(pack_numbers(matrix.numbers, group_size))
    num_inputs = matrix.numbers.shape[1]
    groups.copy_(pack_groups(scales.to(groups.dtype), zeros, num_inputs, group_size))
