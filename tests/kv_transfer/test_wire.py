"""The wire format: what is encoded comes back, and what is damaged is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.errors import CorruptChunk
from kv_transfer.wire.chunk import (
    HEADER,
    Chunk,
    ChunkHeader,
    ChunkKind,
    decode_chunk,
    encode_chunk,
)

u32 = st.integers(0, 2**32 - 1)
headers = st.builds(
    ChunkHeader,
    kind=st.sampled_from(ChunkKind),
    transfer_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    attempt=u32,
    group=st.integers(0, 2**8 - 1),
    layer=u32,
    first_block=u32,
    num_blocks=u32,
    shape=u32,
    chunk_bytes=u32,
)
payloads = st.lists(st.binary(min_size=1, max_size=200), max_size=4)


def encode(header: ChunkHeader, parts: list[bytes]) -> bytes:
    return encode_chunk(header, [np.frombuffer(part, np.uint8) for part in parts])


def decode(message: bytes) -> Chunk:
    return decode_chunk(np.frombuffer(message, np.uint8))


@given(headers, payloads)
def test_round_trip(header: ChunkHeader, parts: list[bytes]) -> None:
    message = encode(header, parts)
    chunk = decode(message)
    assert chunk.header == header
    assert chunk.payload.tobytes() == b"".join(parts)
    assert len(message) == HEADER.size + sum(map(len, parts))


@given(headers, payloads, st.data())
def test_any_flipped_bit_is_noticed(
    header: ChunkHeader, parts: list[bytes], data: st.DataObject
) -> None:
    message = bytearray(encode(header, parts))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptChunk):
        decode(bytes(message))


@given(headers, payloads, st.data())
def test_any_other_length_is_noticed(
    header: ChunkHeader, parts: list[bytes], data: st.DataObject
) -> None:
    message = encode(header, parts)
    cut = data.draw(st.integers(0, len(message) - 1))
    for wrong in (message[:cut], message + message[:1]):
        with pytest.raises(CorruptChunk):
            decode(wrong)


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CorruptChunk):
        decode(noise)
    with pytest.raises(CorruptChunk):
        decode(b"TDKV\x03" + noise)


def test_golden_bytes() -> None:
    """Changing these bytes is a new version of the format."""
    header = ChunkHeader(
        kind=ChunkKind.DATA,
        transfer_id="000102030405060708090a0b0c0d0e0f",
        attempt=1,
        group=8,
        layer=2,
        first_block=3,
        num_blocks=4,
        shape=5,
        chunk_bytes=7,
    )
    assert encode(header, [b"KV"]).hex() == (
        "54444b560300080001000000000102030405060708090a0b0c0d0e0f02000000"
        "03000000040000000500000007000000020000000000000000000000ad584f244b56"
    )
