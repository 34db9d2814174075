"""The header of a safetensors file: which tensor lies where, without reading any.

    8 bytes, little-endian      the length of the header
    that many bytes of JSON     name to dtype, shape and range of bytes behind the header
    tensors                     back to back

Nothing in a header is taken on trust: ranges cover the file without holes and overlaps, and each is
as long as its dtype and shape make it. What the reference library (safetensors 0.8) refuses is
refused here. Checkpoints, adapters, drafters and towers are all read by this.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from engine.models.errors import CheckpointError
from engine.models.slow_reads import telling_slow_reads

DOWNLOAD_AGAIN = "copy or download the checkpoint again"
PIECE_BYTES = 8 << 20
"""Tensors are read, and hashed, by whole rows of at most this size."""
_MAX_HEADER_BYTES = 100 << 20
_LENGTH_BYTES = 8
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of a number, by the format's name of its type."""

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Says where one tensor lies, and what its file calls it.

    Attributes:
        start, stop: Offsets in the file, in bytes.
        column, num_columns: Of a tensor that is some columns of a matrix, turned: the first of
            them, and how many the matrix has, which lies from `start` to `stop`. 0: of no matrix.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    column: int = 0
    num_columns: int = 0

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name. Raises `CheckpointError`: it cannot be read, is cut
    off, or its header is broken."""
    try:
        with telling_slow_reads(path), path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            fits = size >= _LENGTH_BYTES and length <= size - _LENGTH_BYTES
            header = file.read(length) if fits and length <= _MAX_HEADER_BYTES else None
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error.strerror or error})", DOWNLOAD_AGAIN
        ) from error
    if header is None:
        raise CheckpointError(
            path, f"is cut off or no safetensors file ({size} bytes)", DOWNLOAD_AGAIN
        )
    return parse_header(path, header, size)


def parse_header(path: Path, header: bytes, size: int) -> dict[str, StoredTensor]:
    """Returns the tensors that the JSON of a file of `size` bytes names.

    Raises:
        CheckpointError: The header is broken, or the file is cut off.
    """
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = entries.pop("__metadata__", msgspec.Raw(b"null"))
        msgspec.json.decode(metadata, type=dict[str, str] | None)
        decoded = {
            name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in entries.items()
        }
    except RecursionError as error:
        raise _broken(path, "JSON nested too deep") from error
    except ValueError as error:  # of JSON, of its types, of UTF-8
        raise _broken(path, str(error)) from error
    data = _LENGTH_BYTES + len(header)
    tensors = {}
    for name, entry in decoded.items():
        start, stop = (data + offset for offset in entry.data_offsets)
        tensors[name] = StoredTensor(name, path, entry.dtype, tuple(entry.shape), start, stop)
    _check_ranges(path, tensors, data, size)
    return tensors


def _check_ranges(path: Path, tensors: dict[str, StoredTensor], data: int, size: int) -> None:
    end = data
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        bits = _BITS.get(tensor.dtype)
        if bits is None:
            raise _broken(path, f"{tensor.name} is of the unknown type {tensor.dtype!r}")
        if tensor.start != end:
            kind = "overlap" if tensor.start < end else "leave a hole"
            raise _broken(path, f"the bytes of {tensor.name} and of what is before it {kind}")
        if 8 * tensor.num_bytes != bits * prod(tensor.shape):
            raise _broken(
                path,
                f"{tensor.name} has {tensor.num_bytes} bytes, which is not what {tensor.dtype} "
                f"of shape {list(tensor.shape)} takes",
            )
        end = tensor.stop
    if end > size:
        raise CheckpointError(path, f"is cut off: {size} of {end} bytes are there", DOWNLOAD_AGAIN)
    if end < size:
        raise _broken(path, f"{size - end} bytes belong to no tensor")


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(path, f"has a broken header ({why})", DOWNLOAD_AGAIN)
