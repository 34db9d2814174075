"""A GGUF file that lies is refused in words, whatever it lies about."""

from __future__ import annotations

import struct

import pytest

from engine.models.gguf.gguf_header import GgufHeader

UINT32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def of_values(*values: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values)


def alignment(kind: int, value: bytes) -> bytes:
    return of_values(text("general.alignment") + struct.pack("<I", kind) + value)


@pytest.mark.parametrize(
    "data",
    [
        alignment(UINT32, struct.pack("<I", 0)),
        alignment(STRING, text("32")),
        alignment(ARRAY, struct.pack("<IQI", UINT32, 1, 32)),
        alignment(5, struct.pack("<i", -32)),
    ],
)
def test_an_alignment_that_is_none(data: bytes) -> None:
    with pytest.raises(ValueError, match="aligned to"):
        GgufHeader(memoryview(data))


def test_a_real_alignment_counts() -> None:
    assert GgufHeader(memoryview(alignment(UINT32, struct.pack("<I", 64)))).tensors == []


def test_a_name_in_an_error_is_short_and_printable() -> None:
    name = "\x05" * 100_000
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(name) + struct.pack("<I", 4_653_056)
    with pytest.raises(ValueError, match="has 4653056 dimensions") as caught:
        GgufHeader(memoryview(data))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
