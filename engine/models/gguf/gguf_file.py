"""A GGUF file: its metadata, typed, and its tensors, dequantised.

The package `gguf` (the extra of the same name) knows its types of numbers. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.models.errors import CheckpointError
from engine.models.gguf.gguf_header import GgufHeader, GgufTensor

_T = TypeVar("_T")
Numbers = npt.NDArray[np.float32]


class GgufFile:
    """Wraps one file.

    Attributes:
        architecture: As llama.cpp calls it, like "llama".

    Raises:
        CheckpointError: The package is not installed, or the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._gguf: Any = import_module("gguf")
        except ImportError as error:
            raise CheckpointError(
                path, "is a GGUF file, which the package gguf reads", "install tandem[gguf]"
            ) from error
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
            header = GgufHeader(self._data.data)
        except (OSError, ValueError, struct.error, RecursionError, MemoryError) as error:
            raise CheckpointError(
                path, f"is no GGUF file that can be read ({error})", "download the file again"
            ) from error
        self._values, self._tensors = header.values, header.tensors
        self.architecture = self.get("general.architecture", str, "")

    def get(self, name: str, kind: type[_T], default: _T) -> _T:
        """Returns a value of the metadata. Raises `CheckpointError` where it is of another type."""
        value = self._values.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise CheckpointError(self.path, f"has {value!r} for {name}", "download the file again")
        return value

    def own(self, name: str, kind: type[_T], default: _T) -> _T:
        """Returns a value that belongs to the architecture, like "block_count"."""
        return self.get(f"{self.architecture}.{name}", kind, default)

    def size(self, name: str) -> int:
        """Returns a number that the architecture must have. Raises `CheckpointError`."""
        value = self.own(name, int, 0)
        if value < 1:
            raise CheckpointError(self.path, f"lacks {name}", "download the file again")
        return value

    @property
    def names(self) -> set[str]:
        return {tensor.name for tensor in self._tensors}

    @property
    def is_half(self) -> bool:
        """Returns whether no tensor is quantised: they are in float16 and float32."""
        types = self._gguf.GGMLQuantizationType
        return {tensor.type_id for tensor in self._tensors} <= {types.F16, types.F32}

    def tensors(self) -> Iterator[tuple[str, Numbers]]:
        """Yields each tensor in float32. Raises `CheckpointError`: one is cut off, or of a type
        that the package does not know."""
        for tensor in self._tensors:
            yield tensor.name, self._dequantised(tensor)

    def tensor(self, name: str) -> Numbers:
        return next(self._dequantised(tensor) for tensor in self._tensors if tensor.name == name)

    def _dequantised(self, tensor: GgufTensor) -> Numbers:
        gguf = self._gguf
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            size = prod(tensor.shape) // block * block_bytes
            data = self._data[tensor.start : tensor.start + size]
            stored = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
            row_bytes = tensor.shape[-1] // block * block_bytes
            rows = data.reshape(-1, row_bytes).view(stored)
            numbers = gguf.dequantize(np.asarray(rows), kind)
            found: Numbers = np.asarray(numbers, dtype=np.float32).reshape(tensor.shape)
        except (NotImplementedError, KeyError, ValueError) as error:
            raise CheckpointError(
                self.path,
                f"has a tensor {tensor.name} that the package gguf does not dequantise ({error})",
                "download the file again, or use one in another quantisation",
            ) from error
        return found
