"""FP8 weights as checkpoints hold them: `weight` in e4m3, and scales by block, output or tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.layers.methods.base import LinearPart
from engine.layers.methods.weight_format import StoredMatrix, WeightFormat
from engine.layers.shard import FLOATS, TensorSlice
from engine.quantization import Fp8Scheme
from tandem_kernels.reference.fp8 import dequantise_rows, quantise_fp8

E4M3 = frozenset({"F8_E4M3"})
SCALES = FLOATS | {"F8_E8M0"}
_DUMMY_SCALE = 0.02


class Fp8Format(WeightFormat):
    """A weight is its number times its scale, whatever the scale's name in the checkpoint says."""

    def __init__(self, scheme: Fp8Scheme) -> None:
        self.scheme = scheme

    def matrix(self, part: LinearPart, num_outputs: int, num_inputs: int) -> StoredMatrix:
        count = (num_outputs, num_inputs)[part.dim]
        if self.scheme.online:
            return _online(part, count)
        weight = TensorSlice(part.prefix + ".weight", part.shape, part.dim, part.start, count, E4M3)
        slices: tuple[TensorSlice, ...] = (weight, self._scale(part, count))
        if self.scheme.activations == "static":
            slices = (*slices, _scalar(part.prefix + ".input_scale"))
        if self.scheme.scales == "block":
            return StoredMatrix(slices, self._dequantiser(part))
        return StoredMatrix(
            slices, lambda numbers, scale, *_: numbers.float() * scale.float().view(-1, 1)
        )

    def _scale(self, part: LinearPart, count: int) -> TensorSlice:
        """Returns the slice of scales that belong to a slice of weights."""
        name = f"{part.prefix}.{self.scheme.scale_name}"
        if self.scheme.scales == "tensor":
            return _scalar(name)
        if self.scheme.scales == "channel":
            shape: tuple[int, ...] = (part.shape[0], 1)
            dim = 0 if part.dim == 0 else None
            return TensorSlice(name, shape, dim, part.start, count, SCALES, _DUMMY_SCALE)
        outputs, inputs = self.scheme.block
        shape = -(-part.shape[0] // outputs), -(-part.shape[1] // inputs)
        size = self.scheme.block[part.dim]
        first, end = part.start // size, -(-(part.start + count) // size)
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


def _online(part: LinearPart, count: int) -> StoredMatrix:
    """Returns a plain matrix as its own e4m3 numbers. It is read whole: a scale is of all inputs of
    an output, so weights are the same for any number of ranks."""

    def dequantise(plain: Tensor) -> Tensor:
        numbers, scales = quantise_fp8(plain)
        wide = dequantise_rows(numbers, scales)
        return wide.narrow(part.dim, part.start, count)

    return StoredMatrix((TensorSlice(part.prefix + ".weight", part.shape),), dequantise)
