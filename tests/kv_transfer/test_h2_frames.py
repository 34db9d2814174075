"""The HTTP/2 words: what is written can be read, and nonsense has a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import h2_frames as h2

names = st.text("abcdefghijklmnopqrstuvwxyz-:", min_size=1, max_size=20)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300)


def literal(name: str, value: str, first: int = 0) -> bytes:
    return bytes([first]) + h2._string(name) + h2._string(value)


@given(st.dictionaries(names, values, max_size=6), st.sampled_from([0x00, 0x10, 0x40]))
def test_literal_fields_of_every_kind(fields: dict[str, str], first: int) -> None:
    block = b"".join(literal(name, value, first) for name, value in fields.items())
    assert h2.parse_headers(b"\x3f\x01" + block) == fields


def test_indexed_fields_and_names() -> None:
    assert h2.parse_headers(b"\x88") == {":status": "200"}
    assert h2.parse_headers(b"\x8d\x83") == {":status": "404"}
    assert h2.parse_headers(b"\x08\x03503") == {":status": "503"}
    huffman = b"\x40" + h2._string("grpc-status") + b"\x81\x07"
    assert h2.parse_headers(huffman) == {"grpc-status": ""}


@given(st.binary(max_size=60))
def test_noise_in_a_header_block_is_read_or_refused(noise: bytes) -> None:
    try:
        fields = h2.parse_headers(noise)
    except h2.H2Error:
        return
    assert all(isinstance(value, str) for value in fields.values())


@pytest.mark.parametrize("block", [b"\x00", b"\x00\x05abc", b"\x00\x01a", b"\xff\xff\xff\xff\xff"])
def test_a_block_that_stops_in_the_middle_is_refused(block: bytes) -> None:
    with pytest.raises(h2.H2Error):
        h2.parse_headers(block)


@given(
    length=st.integers(0, 1000),
    kind=st.sampled_from(h2.FrameKind),
    flags=st.integers(0, 255),
    stream=st.integers(0, h2.MAX_WINDOW),
)
def test_frame_headers(length: int, kind: h2.FrameKind, flags: int, stream: int) -> None:
    data = h2.frame(kind, flags, stream, bytes(length))
    assert len(data) == h2.FRAME_HEADER_BYTES + length
    assert h2.parse_frame_header(memoryview(data)) == (length, kind, flags, stream)


def test_padding_is_taken_off() -> None:
    flags = h2.PADDED | h2.PRIORITY
    assert h2.without_padding(b"\x02" + b"12345" + b"block" + b"\0\0", flags) == b"block"
    assert h2.without_padding(b"block", 0) == b"block"
    with pytest.raises(h2.H2Error):
        h2.without_padding(b"\x09abc", h2.PADDED)


@given(st.binary(max_size=50_000))
def test_a_long_request_goes_out_in_frames_that_every_server_takes(message: bytes) -> None:
    data = memoryview(h2.request(3, "/service/Call", "host:1", message))
    body = b""
    kinds = []
    while data:
        length, kind, flags, stream = h2.parse_frame_header(data)
        assert stream == 3 and length <= 1 << 14
        kinds.append((kind, bool(flags & h2.END_STREAM)))
        if kind == h2.FrameKind.DATA:
            body += data[9 : 9 + length]
        else:
            fields = h2.parse_headers(bytes(data[9 : 9 + length]))
            assert fields[":path"] == "/service/Call" and fields["te"] == "trailers"
        data = data[9 + length :]
    assert body == b"\0" + len(message).to_bytes(4) + message
    assert kinds[0] == (h2.FrameKind.HEADERS, False)
    assert [ends for _, ends in kinds] == [False] * (len(kinds) - 1) + [True]
