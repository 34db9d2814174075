"""Knows how a checkpoint lays out the integers of a matrix: several in a word, or one in a byte.

Numbers are returned as 0 to 2^bits - 1, whatever is stored: of signed ones 2^(bits - 1) is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.layers.shard import FLOATS, TensorSlice

INT32 = frozenset({"I32"})
Axis = Literal["outputs", "inputs"]
Container = Literal["I32", "U8", "I8", "floats"]
_WORD_BITS = {"I32": 32, "U8": 8}


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """Describes one of a matrix' tensors.

    Attributes:
        container: A word for several numbers, a byte for one, or what scales are stored in.
        transposed: Outputs are the second dimension.
        packed: The axis along which numbers share a word; None: none do.
        is_signed: Numbers are two's complements.
        order: Number i of a word is in its `order[i]`-th bits; empty: they are in order.
    """

    suffix: str
    container: Container = "I32"
    transposed: bool = False
    packed: Axis | None = None
    is_signed: bool = False
    order: tuple[int, ...] = ()

    def slice_of(
        self,
        prefix: str,
        shape: tuple[int, int],
        starts: tuple[int, int],
        counts: tuple[int, int],
        bits: int,
        dummy: float | None = None,
    ) -> TensorSlice:
        """Returns the words that hold the part [counts[0], counts[1]] from `starts` on of a matrix
        [outputs, inputs] of `shape`, which is cut in one axis. `dummy`: the scale of random
        numbers."""
        sizes, first = list(shape), list(starts)
        last = [starts[0] + counts[0], starts[1] + counts[1]]
        if self.packed is not None:
            axis, per_word = self._axis, self._per_word(bits)
            for bounds in (sizes, last):
                bounds[axis] = -(-bounds[axis] // per_word)
            first[axis] //= per_word
        cut = next((axis for axis in (0, 1) if (first[axis], last[axis]) != (0, sizes[axis])), None)
        stored = FLOATS if self.container == "floats" else frozenset({self.container})
        dim, start, count = None, 0, 0
        if cut is not None:
            dim, start, count = cut, first[cut], last[cut] - first[cut]
            if self.transposed:
                dim = 1 - dim
        if self.transposed:
            sizes.reverse()
        return TensorSlice(
            f"{prefix}.{self.suffix}", (sizes[0], sizes[1]), dim, start, count, stored, dummy
        )

    def read(
        self, stored: Tensor, starts: tuple[int, int], counts: tuple[int, int], bits: int
    ) -> Tensor:
        """Returns what a slice holds, [outputs, inputs or groups]; numbers in uint8."""
        if self.transposed:
            stored = stored.t()
        if self.container == "floats":
            return stored
        sign = 1 << bits - 1 if self.is_signed else 0
        if self.packed is None:
            return ((stored.short() & (1 << bits) - 1) ^ sign).byte()
        axis, per_word = self._axis, self._per_word(bits)
        shape = *stored.shape, per_word
        numbers = torch.empty(shape, dtype=torch.uint8, device=stored.device)
        for index, place in enumerate(self.order or range(per_word)):
            numbers[..., index] = (stored >> bits * place & (1 << bits) - 1) ^ sign
        unpacked = numbers.movedim(2, axis + 1).flatten(axis, axis + 1)
        return unpacked.narrow(axis, starts[axis] % per_word, counts[axis])

    @property
    def _axis(self) -> int:
        return 0 if self.packed == "outputs" else 1

    def _per_word(self, bits: int) -> int:
        return _WORD_BITS[self.container] // bits
