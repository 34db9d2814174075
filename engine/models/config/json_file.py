"""JSON and text files of a checkpoint; JSON typed, as Python's json reads it.

It is read as transformers reads it: `NaN`, `Infinity` and `-Infinity` are numbers. Values that
no setting can have are refused where they are used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.models.errors import CheckpointError
from engine.models.slow_reads import telling_slow_reads

_File = TypeVar("_File")
_COPY_AGAIN = "copy or download the file again"


def read_json(path: Path, kind: type[_File]) -> _File:
    """Raises `CheckpointError` naming the line's fault and the field."""
    return parse_json(path, _read(path), kind)


def read_text(path: Path) -> str:
    """Returns what a file in UTF-8 says. Raises `CheckpointError`."""
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"is no text in UTF-8 ({error.reason})", _COPY_AGAIN) from error


def _read(path: Path) -> bytes:
    try:
        with telling_slow_reads(path):
            return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            path, "is missing", "name a folder with a complete Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error.strerror or error})", _COPY_AGAIN
        ) from error


def parse_json(path: Path, data: bytes, kind: type[_File]) -> _File:
    """Returns what a file at `path` with these bytes says. Raises `CheckpointError`."""
    try:
        return msgspec.convert(json.loads(data), kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(path, str(error), "correct the field") from error
    except RecursionError as error:
        raise CheckpointError(path, "is JSON nested too deep", _COPY_AGAIN) from error
    except ValueError as error:
        raise CheckpointError(path, f"is not valid JSON ({error})", _COPY_AGAIN) from error
