"""Reads MXFP8: numbers in e4m3 [out, in], and a power of two (e8m0) for each 32 inputs.

Source: OCP Microscaling Formats 1.0, with Rouhani et al. (arXiv 2310.10537).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.fp4_format import E8M0
from engine.layers.methods.formats.fp8_format import E4M3
from engine.layers.methods.formats.weight_format import StoredMatrix, WeightFormat
from engine.layers.shard import TensorSlice
from engine.quantization import Mxfp8Scheme
from tandem_kernels.reference.mxfp4 import e8m0_powers

GROUP = 32
_DUMMY_POWER = 2.0**-6


class Mxfp8Format(WeightFormat):
    """A weight is its number times the power of its group."""

    def __init__(self, scheme: Mxfp8Scheme) -> None:
        self.scheme = scheme

    def matrix(self, part: LinearPart, num_outputs: int, num_inputs: int) -> StoredMatrix:
        outputs, inputs = part.shape
        first, end = part.start, part.start + num_outputs
        if part.dim == 1:
            first, end = part.start // GROUP, -(-(part.start + num_inputs) // GROUP)
        before = part.start % GROUP if part.dim == 1 else 0
        count = (num_outputs, num_inputs)[part.dim]
        numbers = TensorSlice(
            f"{part.prefix}.weight", part.shape, part.dim, part.start, count, E4M3
        )
        powers = TensorSlice(
            f"{part.prefix}.{self.scheme.scale_name}",
            (outputs, -(-inputs // GROUP)),
            part.dim,
            first,
            end - first,
            E8M0,
            _DUMMY_POWER,
        )

        def dequantise(stored: Tensor, exponents: Tensor) -> Tensor:
            wide = e8m0_powers(exponents.view(torch.uint8)).repeat_interleave(GROUP, 1)
            return stored.float() * wide.narrow(1, before, num_inputs)

        return StoredMatrix((numbers, powers), dequantise, (f"{part.prefix}.input_scale",))
