"""The checksum is CRC-32C, with Python's lock and without."""

from __future__ import annotations

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.wire import crc32c

LARGE = bytes(range(256)) * 200


def test_a_known_value() -> None:
    """These are examples of RFC 3720, B.4."""
    assert crc32c.value(bytes(32)) == 0x8A9136AA
    assert crc32c.value(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("has_lock", [False, True])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: memoryview(bytearray(b))])
def test_parts_make_the_whole(kind, has_lock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_lock:
        monkeypatch.setattr(crc32c, "_unlocked", None)
    whole = google_crc32c.value(LARGE)
    for cut in (0, 1, 100, 20_000, len(LARGE)):
        first = crc32c.value(kind(LARGE[:cut]))
        assert crc32c.extend(first, kind(LARGE[cut:])) == whole


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_the_library_computes_what_its_binding_does(data: bytes, crc: int, times: int) -> None:
    data *= times
    assert crc32c.extend(crc, data) == google_crc32c.extend(crc, data)


def test_the_library_is_found() -> None:
    """Wheels for Linux show it. Where it is not found, transfers are slower and nothing else."""
    assert crc32c.find_unlocked() is not None
