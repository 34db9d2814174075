"""Computes linear layers with weights of 8-bit integers, which stay so in memory.

Where the checkpoint says so, inputs are quantised to int8, too, by the largest number of each token
(as LLM.int8's rows, arXiv 2208.07339), with the norm or the activation that computes them. Else few
rows are multiplied as weights are unpacked, and for many the weights are written out in half
precision and multiplied as plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

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
from engine.layers.methods.formats.integer_format import IntegerFormat, IntegerMatrix
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.methods.quantised.eight_bits import EightBitLinear
from engine.layers.methods.quantised.written_out import written_out
from engine.layers.rows import RowForm, Rows
from engine.layers.shard import CheckpointWeight, Shard
from engine.parallel.distributed import ParallelGroup
from engine.quantization import Int8Scheme
from tandem_kernels import ops
from tandem_kernels.gemm.int8_shapes import GROUP_MULTIPLE, MULTIPLE

_ZERO = 128
"""This stands for 0 in an `IntegerMatrix`."""


def int8_linear(
    scheme: Int8Scheme, plain: LinearMethod, share: LinearShare, policy: GemmPolicy
) -> LinearMethod | None:
    """Returns the method of a layer; None: it is dequantised as it is loaded. That is where there
    is no kernel, where inputs are ordered by activation or smoothed, where ranks cut groups in
    pieces that are no multiples of 32 inputs, and where sizes are no multiples of 16."""
    num_outputs = sum(part.count for part in share.outputs)
    start, num_inputs = share.inputs
    if scheme.ordered_by_activation or scheme.smoothed:
        return None
    if num_outputs % MULTIPLE or num_inputs % MULTIPLE:
        return None
    has_groups = scheme.group_size > 0
    form = IntegerFormat(scheme)
    if policy.int8 and scheme.activations != "none" and scheme.symmetric and not has_groups:
        return Int8Linear(form)
    if policy.int8_rows == 0:
        return None
    group_size = math.gcd(scheme.group_size, start, num_inputs) if has_groups else num_inputs
    if has_groups and group_size % GROUP_MULTIPLE:
        return None
    return Int8WeightLinear(plain, form, num_inputs // group_size, policy)


def signed(matrix: IntegerMatrix) -> Tensor:
    """Returns the numbers as int8, [N, K]."""
    return (matrix.numbers ^ _ZERO).view(torch.int8)


class Int8Linear(EightBitLinear):
    """Has weights and inputs in int8."""

    dtype = torch.int8
    input_form: ClassVar[RowForm | None] = RowForm("int8")

    def __init__(self, form: IntegerFormat) -> None:
        self.form = form

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        weight, scales = layer.weight[part.rows], layer.weight_scale[part.rows]
        slices, read = self.form.quantised_matrix(part, *weight.shape)

        def fill(*stored: Tensor) -> None:
            matrix = read(*stored).in_output_order(part.order)
            weight.copy_(signed(matrix))
            scales.copy_(matrix.scales.view(-1))

        yield filled_weight(weight, slices, fill, self.form.beside(part.prefix))
        yield from bias_weights(layer, part)

    def apply_rows(self, layer: LinearLayer, x: Rows) -> Tensor:
        given = self._rows.quantised(x)
        return ops.int8_gemm(
            given.numbers,
            given.scales,
            layer.weight,
            layer.weight_scale,
            layer.bias,
            torch.bfloat16,
        )

    def gate_up_rows(
        self, layer: LinearLayer, x: Rows, form: RowForm | None, is_gelu: bool
    ) -> Rows:
        given = self._rows.quantised(x)
        if is_gelu or layer.bias is not None:
            both = self.apply_rows(layer, given)
            if form is not None:
                return form.activated(both, is_gelu)
            return ops.gelu_tanh_and_mul(both) if is_gelu else ops.silu_and_mul(both)
        out = ops.int8_gate_up(
            given.numbers, given.scales, layer.weight, layer.weight_scale, torch.bfloat16
        )
        return out if form is None else form.quantised(out)


class Int8WeightLinear(LinearMethod):
    """Holds `weight` [out, in] in int8, `weight_scale` [groups, out] in float32 and, where there
    are zero points, `weight_zero` [groups, out] in int8.

    Args:
        plain: Computes many rows, of weights that are written out.
        num_groups: Of this rank's inputs.
    """

    def __init__(
        self, plain: LinearMethod, form: IntegerFormat, num_groups: int, policy: GemmPolicy
    ) -> None:
        self.plain = plain
        self.form = form
        self.num_groups = num_groups
        self.rows = policy.int8_rows
        self.residual_rows = policy.residual_rows

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        of_groups = self.num_groups, num_outputs
        layer.weight = shard.parameter(num_outputs, num_inputs, dtype=torch.int8)
        layer.weight_scale = shard.parameter(*of_groups, dtype=torch.float32)
        layer.weight_zero = None
        if not self.form.scheme.symmetric:
            layer.weight_zero = shard.parameter(*of_groups, dtype=torch.int8)
        layer.bias = shard.parameter(num_outputs) if bias else None

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        weight, scales = layer.weight[part.rows], layer.weight_scale[:, part.rows]
        zeros = None if layer.weight_zero is None else layer.weight_zero[:, part.rows]
        slices, read = self.form.quantised_matrix(part, *weight.shape)

        def fill(*stored: Tensor) -> None:
            matrix = read(*stored).in_output_order(part.order)
            # Ranks may cut groups: ours are of this many inputs that none is of two.
            groups = matrix.group_of[:: weight.shape[1] // self.num_groups]
            weight.copy_(signed(matrix))
            scales.copy_(matrix.scales[:, groups].t())
            if zeros is not None:
                zeros.copy_((matrix.zeros[:, groups] ^ _ZERO).view(torch.int8).t())

        yield filled_weight(weight, slices, fill, self.form.beside(part.prefix))
        yield from bias_weights(layer, part)

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if len(x) <= self.rows:
            return ops.int8_weight_gemm(x, *_held(layer), layer.bias)
        return self.plain.apply(self._written_out(layer, x), x)

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if len(x) <= self.rows:
            return ops.int8_weight_gate_up(x, *_held(layer))
        return self.plain.gate_up(self._written_out(layer, x), x)

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        if len(x) <= self.rows or not 0 < self.residual_rows <= len(x):
            return False
        return self.plain.add_to(self._written_out(layer, x), x, residual)

    def reduce(self, local: Tensor, group: ParallelGroup) -> Tensor:
        return self.plain.reduce(local, group)

    @staticmethod
    def _written_out(layer: LinearLayer, x: Tensor) -> LinearLayer:
        return written_out(ops.int8_dequantise(*_held(layer), x.dtype), layer.bias)


def _held(layer: LinearLayer) -> tuple[Tensor, Tensor, Tensor | None]:
    return layer.weight, layer.weight_scale, layer.weight_zero
