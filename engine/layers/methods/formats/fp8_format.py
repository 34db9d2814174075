"""FP8 weights as checkpoints hold them: `weight` in e4m3, and scales by block, output or tensor.

Sources: Micikevicius et al., FP8 Formats (arXiv 2209.05433); DeepSeek-V3 (arXiv 2412.19437, 3.3)
for blocks of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.weight_format import StoredMatrix, WeightFormat
from engine.layers.shard import FLOATS, TensorSlice
from engine.quantization import Fp8Scheme
from tandem_kernels.reference.fp8 import quantise_fp8

E4M3 = frozenset({"F8_E4M3"})
SCALES = FLOATS | {"F8_E8M0"}
_DUMMY_SCALE = 0.02

Channels = Callable[..., tuple[Tensor, Tensor]]


class Fp8Format(WeightFormat):
    """A weight is its number times its scale, whatever the scale's name in the checkpoint says."""

    def __init__(self, scheme: Fp8Scheme) -> None:
        self.scheme = scheme

    def matrix(self, part: LinearPart, num_outputs: int, num_inputs: int) -> StoredMatrix:
        count = (num_outputs, num_inputs)[part.dim]
        if self.scheme.scales == "block":
            slices = self._weight(part, count), self._block_scales(part, count)
            return StoredMatrix(slices, self._dequantiser(part))
        own, channels = self.channels(part, count)

        def dequantise(*stored: Tensor) -> Tensor:
            numbers, scales = channels(*stored)
            return numbers.float() * scales[:, None]

        return StoredMatrix(own, dequantise)

    def channels(self, part: LinearPart, count: int) -> tuple[tuple[TensorSlice, ...], Channels]:
        """Returns what is read for `count` outputs or inputs of a part, and a function of these
        slices: its numbers [N, K] e4m3, and float32 scales, [N] or [1] for all. Not for blocks."""
        if self.scheme.online:
            return (TensorSlice(part.prefix + ".weight", part.shape),), _quantised_now(part, count)
        name = f"{part.prefix}.{self.scheme.scale_name}"
        scale = _scalar(name)
        if self.scheme.scales == "channel":
            dim = 0 if part.dim == 0 else None
            shape = part.shape[0], 1
            scale = TensorSlice(name, shape, dim, part.start, count, SCALES, _DUMMY_SCALE)
        slices: tuple[TensorSlice, ...] = (self._weight(part, count), scale)
        if self.scheme.activations == "static":
            # Tokens are quantised by their own largest numbers, which is more exact.
            slices = (*slices, _scalar(part.prefix + ".input_scale"))
        return slices, lambda numbers, scale, *_: (numbers, scale.float().view(-1))

    @staticmethod
    def _weight(part: LinearPart, count: int) -> TensorSlice:
        return TensorSlice(part.prefix + ".weight", part.shape, part.dim, part.start, count, E4M3)

    def _block_scales(self, part: LinearPart, count: int) -> TensorSlice:
        """Returns the slice of scales that belong to a slice of weights."""
        outputs, inputs = self.scheme.block
        shape = -(-part.shape[0] // outputs), -(-part.shape[1] // inputs)
        size = self.scheme.block[part.dim]
        first, end = part.start // size, -(-(part.start + count) // size)
        name = f"{part.prefix}.{self.scheme.scale_name}"
        return TensorSlice(name, shape, part.dim, first, end - first, SCALES, _DUMMY_SCALE)

    def _dequantiser(self, part: LinearPart) -> Callable[..., Tensor]:
        """Returns how blocks are dequantised; the first and the last one may be cut."""
        block = self.scheme.block

        def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
            wide = scales.float()
            for dim, size in enumerate(block):
                before = part.start % size if dim == part.dim else 0
                wide = wide.repeat_interleave(size, dim).narrow(dim, before, numbers.shape[dim])
            return numbers.float() * wide

        return dequantise


def _scalar(name: str) -> TensorSlice:
    return TensorSlice(name, (), stored=SCALES, dummy=_DUMMY_SCALE)


def _quantised_now(part: LinearPart, count: int) -> Channels:
    """Returns how a plain matrix is quantised. It is read whole: a scale is of all inputs of an
    output, so weights are the same for any number of ranks."""

    def channels(plain: Tensor) -> tuple[Tensor, Tensor]:
        if part.dim == 0:
            plain = plain.narrow(0, part.start, count)
        numbers, scales = quantise_fp8(plain)
        if part.dim == 1:
            numbers = numbers.narrow(1, part.start, count)
        return numbers, scales[0]

    return channels
