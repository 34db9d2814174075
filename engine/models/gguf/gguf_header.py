"""The header of a GGUF file: its metadata, and where its tensors lie.

    "GGUF", version, number of tensors, number of values
    values      name, kind, value; an array has the kind of its elements and their number
    tensors     name, number of dimensions, dimensions (the innermost first), type, offset
    the tensors themselves, from the next multiple of `general.alignment` on

All numbers are little-endian. The package `gguf` reads the same, and is slow with the vocabulary of
Gemma 3 (0.19.0: about a minute under a profiler). Source: the description of the format in ggml's
docs/gguf.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Says where a tensor lies.

    Attributes:
        shape: As torch has it: the innermost dimension last.
        type_id: Of its numbers, as the format counts them.
        start: Of its bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int


class GgufHeader:
    """Reads from the first byte on. Raises `ValueError` for what is no such file, `struct.error`
    where it ends early."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0
        if bytes(data[:4]) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"it is of version {version}, not 2 or 3")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self.values: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._string()
            self.values[name] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = self.values.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its tensors are aligned to {alignment!r} bytes")
        start = -(-self._at // alignment) * alignment
        self.tensors = [
            GgufTensor(name, shape, type_id, start + offset)
            for name, shape, type_id, offset in found
        ]

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        length = self._number("Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError("a text ends behind the file")
        text = str(self._data[self._at : end], "utf-8", errors="replace")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _BOOL:
            return self._number("B") != 0
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind in _NUMBERS:
                form = f"<{count}{_NUMBERS[kind]}"
                values = list(struct.unpack_from(form, self._data, self._at))
                self._at += struct.calcsize(form)
                return values
            if count > len(self._data):
                raise ValueError(f"an array has {count} elements")
            return [self._value(kind) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"a value is of the unknown kind {kind}")
        return self._number(_NUMBERS[kind])

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("I")
        if num_dims > 4:
            raise ValueError(f"{name[:100]!r} has {num_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dims))
        return name, shape[::-1], self._number("I"), self._number("Q")
