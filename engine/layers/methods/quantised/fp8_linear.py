"""Computes linear layers with FP8 weights and FP8 inputs (formats: `fp8_format`).

Inputs are quantised by the largest number of each token (and each 128 inputs under blocks), with
the norm or the activation that computes them where there is one.
"""

from __future__ import annotations

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
from engine.layers.methods.formats.fp8_format import Fp8Format
from engine.layers.methods.formats.weight_format import filled_weight
from engine.layers.methods.quantised.eight_bits import EightBitLinear
from engine.layers.rows import RowForm, Rows, UnscaledProduct
from engine.layers.shard import CheckpointWeight, Shard
from engine.quantization import Fp8Scheme
from tandem_kernels import ops
from tandem_kernels.gemm.fp8_paths import fp8_path, is_own
from tandem_kernels.reference.fp8 import BLOCK

_MULTIPLE = 16
"""The library's GEMMs want multiples of this many inputs and outputs."""
_ALIGNED_BLOCKS = 4
"""Scales of an output's blocks are that many, filled up: the library takes it for granted."""


def fp8_linear(
    scheme: Fp8Scheme, plain: LinearMethod, share: LinearShare, policy: GemmPolicy
) -> LinearMethod | None:
    """Returns the method of a layer; None: it is dequantised as it is loaded. That is where there
    is no kernel, and where ranks or parts cut blocks of scales."""
    num_outputs = sum(part.count for part in share.outputs)
    if not policy.fp8 or num_outputs % _MULTIPLE or share.inputs[1] % _MULTIPLE:
        return None
    if scheme.scales != "block":
        return Fp8Linear(Fp8Format(scheme))
    return Fp8BlockLinear(Fp8Format(scheme)) if _keeps_blocks(scheme, share) else None


def _keeps_blocks(scheme: Fp8Scheme, share: LinearShare) -> bool:
    """Returns whether this rank has whole blocks, in whatever order."""
    edges = [*share.inputs]
    for part in share.outputs:
        edges += (part.start, part.count)
    if scheme.block != (BLOCK, BLOCK) or any(edge % BLOCK for edge in edges):
        return False
    orders = [part.order for part in share.outputs if part.order is not None]
    return all(bool((blocks == blocks[:, :1]).all()) for blocks in map(_by_block, orders))


def _by_block(order: Tensor) -> Tensor:
    """Returns from which block of the checkpoint each output of each of our blocks comes:
    [blocks, BLOCK]."""
    return order.view(-1, BLOCK) // BLOCK


class Fp8Linear(EightBitLinear):
    """Has weights and inputs in e4m3."""

    dtype = torch.float8_e4m3fn
    input_form: ClassVar[RowForm | None] = RowForm("e4m3")

    def __init__(self, form: Fp8Format) -> None:
        self.form = form

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        weight, scales = layer.weight[part.rows], layer.weight_scale[part.rows]
        slices, read = self.form.channels(part, weight.shape[part.dim])

        def fill(*stored: Tensor) -> None:
            numbers, of_outputs = read(*stored)
            of_outputs = of_outputs.expand(len(numbers))
            if part.order is not None:
                order = part.order.to(numbers.device)
                numbers, of_outputs = numbers[order], of_outputs[order]
            weight.copy_(numbers)
            scales.copy_(of_outputs)

        yield filled_weight(weight, slices, fill)
        yield from bias_weights(layer, part)

    def apply_rows(self, layer: LinearLayer, x: Rows) -> Tensor:
        given = self._rows.quantised(x)
        return ops.fp8_gemm(
            given.numbers,
            given.scales,
            layer.weight,
            layer.weight_scale,
            layer.bias,
            torch.bfloat16,
        )

    def unscaled(self, layer: LinearLayer, x: Rows) -> Tensor | UnscaledProduct:
        if layer.bias is not None or not self._leaves_unscaled(layer, x):
            return self.apply_rows(layer, x)
        given = self._rows.quantised(x)
        product = ops.fp8_product(given.numbers, layer.weight)
        return UnscaledProduct(product, given.scales, layer.weight_scale)

    def gate_up_rows(
        self, layer: LinearLayer, x: Rows, form: RowForm | None, is_gelu: bool
    ) -> Rows:
        given = self._rows.quantised(x)
        if is_own(len(given), layer.weight, layer.weight_scale) and not is_gelu:
            out = ops.fp8_gate_up(
                given.numbers, given.scales, layer.weight, layer.weight_scale, torch.bfloat16
            )
            return out if form is None else form.quantised(out)
        product = self.unscaled(layer, given)
        if form is None:
            plain = product.scaled() if isinstance(product, UnscaledProduct) else product
            return ops.gelu_tanh_and_mul(plain) if is_gelu else ops.silu_and_mul(plain)
        return form.activated(product, is_gelu)

    @staticmethod
    def _leaves_unscaled(layer: LinearLayer, x: Rows) -> bool:
        return fp8_path(len(x), layer.weight, layer.weight_scale) == "unscaled"


class Fp8BlockLinear(Fp8Linear):
    """Holds `weight_scale` [out / 128, in / 128 and more]: a scale for each 128 x 128 weights."""

    input_form: ClassVar[RowForm | None] = RowForm("e4m3", BLOCK)

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        super().create(layer, num_outputs, num_inputs, bias, shard)
        blocks = -(-num_inputs // (BLOCK * _ALIGNED_BLOCKS)) * _ALIGNED_BLOCKS
        layer.weight_scale = shard.parameter(num_outputs // BLOCK, blocks, dtype=torch.float32)
        layer.weight_scale.fill_(1.0)

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        weight = layer.weight[part.rows]
        first, last = (part.rows.start or 0) // BLOCK, (part.rows.start or 0) + len(weight)
        inputs = weight.shape[1] // BLOCK
        scales = layer.weight_scale[first : last // BLOCK, :inputs]
        matrix = self.form.matrix(part, *weight.shape)

        def fill(numbers: Tensor, of_blocks: Tensor) -> None:
            if part.order is not None:
                order = part.order.to(numbers.device)
                numbers, of_blocks = numbers[order], of_blocks[_by_block(order)[:, 0]]
            weight.copy_(numbers)
            scales.copy_(of_blocks)

        yield filled_weight(weight, matrix.slices, fill)
        yield from bias_weights(layer, part)
