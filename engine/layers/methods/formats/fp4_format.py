"""Reads four-bit floats as compressed-tensors, ModelOpt and Quark publish them.

Numbers (e2m1) lie by two in a byte along the inputs, the first in the lower half. A weight is its
number times the scale of its group of inputs, times a factor of the whole matrix if there is one.

| | numbers | scales | factor |
|---|---|---|---|
| NVFP4 of ModelOpt | weight [out, in / 2] | weight_scale [out, in / 16] e4m3 | weight_scale_2 |
| NVFP4 of compressed-tensors | weight_packed | weight_scale | 1 / weight_global_scale |
| MXFP4 of ModelOpt and Quark | weight [out, in / 2] | weight_scale [out, in / 32] e8m0 | |
| MXFP4 of compressed-tensors | weight_packed | weight_scale | |
| MXFP4 of DeepSeek-V4 | weight | weight_scale_inv | |

Sources: NVIDIA, Pretraining with NVFP4 (arXiv 2509.25149); OCP Microscaling Formats 1.0, with
Rouhani et al. (arXiv 2310.10537).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.fp8_format import E4M3, SCALES
from engine.layers.methods.formats.weight_format import StoredMatrix, WeightFormat
from engine.layers.shard import FLOATS, TensorSlice
from engine.quantization import Mxfp4Scheme, Nvfp4Scheme
from tandem_kernels.gemm.fp4_tiles import GROUP
from tandem_kernels.reference.mxfp4 import e2m1_numbers, e8m0_powers

BYTES = frozenset({"U8", "I8"})
E8M0 = frozenset({"U8", "F8_E8M0"})
_OF_INPUTS = "input_scale", "input_global_scale", "input_scale_2"
"""Scales of activations, which stay in the model's dtype here."""
_DUMMY_SCALES = {True: 0.25, False: 2.0**-7}
"""Random numbers have these, NVFP4 first; with a factor of 1 / 32 weights are as large as other
dummy weights."""


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """A part of a matrix, N outputs by K inputs, which begins with a group.

    Attributes:
        packed: [N, K / 2] uint8.
        scales: [N, G], e4m3 or, as uint8, e8m0.
        factor: Of all weights, float32 of one element; None: 1.
        smoothing: [K], by which inputs are multiplied first; None: by nothing.
    """

    packed: Tensor
    scales: Tensor
    factor: Tensor | None = None
    smoothing: Tensor | None = None

    def dequantised(self, group: int) -> Tensor:
        """Returns the weights in float32, [N, K]."""
        numbers = e2m1_numbers(self.packed)
        scales = e8m0_powers(self.scales) if self.scales.dtype == torch.uint8 else self.scales
        wide = scales.float()
        if self.factor is not None:
            wide = wide * self.factor
        numbers.mul_(wide.repeat_interleave(group, 1)[:, : numbers.shape[1]])
        return numbers if self.smoothing is None else numbers.mul_(self.smoothing.float())

    def in_output_order(self, order: Tensor | None) -> Fp4Matrix:
        """Returns the matrix with its outputs in the order [N] int64 of `LinearPart.order`."""
        if order is None:
            return self
        order = order.to(self.packed.device)
        # Indices take no float8.
        scales = self.scales.view(torch.uint8)[order].view(self.scales.dtype)
        return replace(self, packed=self.packed[order], scales=scales)


class Fp4Format(WeightFormat):
    """Reads the layout of a scheme of single matrices."""

    def __init__(self, scheme: Nvfp4Scheme | Mxfp4Scheme) -> None:
        self.scheme = scheme
        self.group = scheme.group_size if isinstance(scheme, Nvfp4Scheme) else GROUP
        self._scale_name = "weight_scale"
        if scheme.layout == "deepseek":
            self._scale_name = "weight_scale_inv"
        self.is_smoothed = isinstance(scheme, Nvfp4Scheme) and scheme.smoothed

    def matrix(self, part: LinearPart, num_outputs: int, num_inputs: int) -> StoredMatrix:
        slices, read = self.quantised_matrix(part, num_outputs, num_inputs)
        before = part.start % self.group if part.dim == 1 else 0

        def dequantise(*stored: Tensor) -> Tensor:
            return read(*stored).dequantised(self.group).narrow(1, before, num_inputs)

        return StoredMatrix(slices, dequantise, self.beside(part.prefix))

    def beside(self, prefix: str) -> tuple[str, ...]:
        """Returns names of tensors that may be in the checkpoint beside those of a matrix."""
        return tuple(f"{prefix}.{suffix}" for suffix in _OF_INPUTS)

    def quantised_matrix(
        self, part: LinearPart, num_outputs: int, num_inputs: int
    ) -> tuple[tuple[TensorSlice, ...], Callable[..., Fp4Matrix]]:
        """Returns the slices of the checkpoint that a part [num_outputs, num_inputs] needs, with
        all groups that hold some of it, and the function that makes an `Fp4Matrix` of them."""
        outputs, inputs = part.shape
        first, end, dim = part.start, part.start + num_outputs, 0
        if part.dim == 1:
            first, end = part.start // self.group, -(-(part.start + num_inputs) // self.group)
            dim = 1
        bytes_of = self.group // 2 if dim == 1 else 1
        last = min(end * bytes_of, inputs // 2) if dim == 1 else end
        is_nvfp4 = isinstance(self.scheme, Nvfp4Scheme)
        is_packed = self.scheme.layout == "compressed-tensors"
        slices = [
            TensorSlice(
                f"{part.prefix}.weight_packed" if is_packed else f"{part.prefix}.weight",
                (outputs, inputs // 2),
                dim,
                first * bytes_of,
                last - first * bytes_of,
                BYTES,
            ),
            TensorSlice(
                f"{part.prefix}.{self._scale_name}",
                (outputs, -(-inputs // self.group)),
                dim,
                first,
                end - first,
                E4M3 if is_nvfp4 else E8M0,
                _DUMMY_SCALES[is_nvfp4],
            ),
        ]
        if is_nvfp4:
            suffix = "weight_global_scale" if is_packed else "weight_scale_2"
            dummy = 32.0 if is_packed else 1 / 32
            slices.append(TensorSlice(f"{part.prefix}.{suffix}", (), stored=SCALES, dummy=dummy))
        if self.is_smoothed:
            slices.append(_smoothing(part, first * self.group, (end - first) * self.group))

        def read(packed: Tensor, scales: Tensor, *others: Tensor) -> Fp4Matrix:
            if scales.dtype == torch.float8_e8m0fnu:
                scales = scales.view(torch.uint8)
            factor = others[0].float().reshape(()) if is_nvfp4 else None
            if factor is not None and is_packed:
                factor = 1 / factor
            # Layers that lack it give no tensor.
            smoothing = others[1].view(-1) if len(others) > 1 else None
            return Fp4Matrix(packed.view(torch.uint8), scales, factor, smoothing)

        return tuple(slices), read


def _smoothing(part: LinearPart, start: int, count: int) -> TensorSlice:
    """Returns the slice of what inputs are multiplied by, which some layers lack."""
    is_cut, inputs = part.dim == 1, part.shape[1]
    return TensorSlice(
        f"{part.prefix}.pre_quant_scale",
        (inputs,),
        0 if is_cut else None,
        start if is_cut else 0,
        min(count, inputs - start) if is_cut else 0,
        FLOATS,
        dummy=1.0,
        is_optional=True,
    )


def fp4_format(scheme: Nvfp4Scheme | Mxfp4Scheme) -> Fp4Format | None:
    """Returns the format of single matrices; None: a scheme of all experts in one."""
    return None if scheme.layout == "gpt-oss" else Fp4Format(scheme)
