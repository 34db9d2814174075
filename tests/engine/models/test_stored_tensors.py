"""Headers of safetensors files are believed nothing: what the reference library refuses is refused,
with the file named, and what it takes is taken."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.errors import CheckpointError
from engine.models.files.stored_tensors import read_header

FIRST = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SECOND = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]}
GOOD = {"a": FIRST, "b": SECOND}


def packed(header: dict[str, Any] | bytes, num_bytes: int = 20) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def verdict(data: bytes, path: Path) -> str | None:
    """Returns what ours says against a file, which must be what the reference library decides."""
    path.write_bytes(data)
    try:
        safetensors.deserialize(data)
        is_good = True
    except safetensors.SafetensorError:
        is_good = False
    try:
        read_header(path)
    except CheckpointError as error:
        assert not is_good, f"refused: {error}"
        assert error.path == str(path) and error.cure
        return error.fault
    assert is_good, f"taken: {data!r}"
    return None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (packed(GOOD), None),
        (packed({}, 0), None),
        (packed(GOOD | {"__metadata__": {"format": "pt"}}), None),
        (packed({"z": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}} | GOOD), None),
        (packed(b"  " + json.dumps(GOOD).encode() + b"    "), None),
        (packed({"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}, 2), None),
        (packed(GOOD | {"b": SECOND | {"data_offsets": [0, 12]}}, 12), "overlap"),
        (packed({"a": FIRST, "b": FIRST}, 8), "overlap"),
        (packed({"b": SECOND}), "leave a hole"),
        (packed(GOOD, 24), "4 bytes belong to no tensor"),
        (packed(GOOD, 16), "cut off"),
        (packed({"a": FIRST | {"dtype": "BF16"}}, 8), "a has 8 bytes, which is not what BF16"),
        (packed({"a": FIRST | {"shape": [3]}}, 8), "a has 8 bytes"),
        (packed({"a": FIRST | {"data_offsets": [-8, 0]}}, 8), "broken header"),
        (packed({"a": FIRST | {"shape": [-2]}}, 8), "broken header"),
        (packed({"a": FIRST | {"data_offsets": [8, 0]}}, 8), "a hole"),
        (packed({"a": FIRST | {"dtype": "F5"}}, 8), "unknown type 'F5'"),
        (packed({"a": FIRST | {"shape": [2**63, 4], "data_offsets": [0, 0]}}, 0), "a has 0 bytes"),
        (packed({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1), "a has 1 bytes"),
        (packed({"__metadata__": {"a": 1}, "a": FIRST}, 8), "broken header"),
        (packed(b'{"a": ' + b"[" * 5000 + b"}", 8), "broken header"),
        (packed(b'{"\xff": 1}', 8), "broken header"),
        (b"\x10", "cut off or no safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{}", "cut off or no safetensors file"),
    ],
)
def test_headers_are_taken_and_refused_as_by_the_reference(
    data: bytes, words: str | None, tmp_path: Path
) -> None:
    said = verdict(data, tmp_path / "model.safetensors")
    assert (said is None) == (words is None)
    assert words is None or words in str(said)


_NUMBERS = st.integers(-4, 24)
_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "I64", "X"]),
        "shape": st.lists(st.integers(-1, 4), max_size=3),
        "data_offsets": st.tuples(_NUMBERS, _NUMBERS),
    }
)


@settings(max_examples=150, deadline=None)
@given(entries=st.dictionaries(st.sampled_from("abc"), _ENTRIES), num_bytes=st.integers(0, 24))
def test_any_header(
    entries: dict[str, Any], num_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    verdict(packed(entries, num_bytes), path)


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 400), byte=st.integers(0, 255))
def test_any_byte_may_be_wrong(
    place: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(packed(GOOD | {"__metadata__": {"format": "pt"}}))
    data[place % len(data)] = byte
    verdict(bytes(data), tmp_path_factory.getbasetemp() / "byte.safetensors")
