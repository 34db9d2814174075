"""Holds layers whose weights and inputs both have 8 bits, as floats or as integers."""

from __future__ import annotations

from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from engine.layers.methods.base import LinearLayer, LinearMethod
from engine.layers.rows import RowForm
from engine.layers.shard import Shard


class EightBitLinear(LinearMethod):
    """Holds `weight` [out, in] of 8 bits and `weight_scale` [out] in float32: one scale of a tensor
    is that of all its outputs. Inputs are quantised as `input_form` says."""

    dtype: ClassVar[torch.dtype]
    input_form: ClassVar[RowForm | None]

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        layer.weight = shard.parameter(num_outputs, num_inputs, dtype=self.dtype)
        layer.weight_scale = shard.parameter(num_outputs, dtype=torch.float32)
        layer.bias = shard.parameter(num_outputs) if bias else None
        if layer.weight.is_cuda:
            # Imports triton.
            import_module("tandem_kernels.gemm.fp8_gemm").prepare(layer.weight.device)

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self.apply_rows(layer, x)

    @property
    def _rows(self) -> RowForm:
        """Returns how inputs are quantised."""
        assert self.input_form is not None
        return self.input_form
