"""The HTTP/2 words: what is written can be read, and nonsense has a name."""

from __future__ import annotations

import logging

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from edge.h2 import frames as h2
from edge.security.cluster_token import TOKEN_HEADER

names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300)


def block_of(frame: bytes) -> bytes:
    return frame[h2.FRAME_HEADER_BYTES :]


def read(block: bytes, flags: int = h2.END_HEADERS) -> dict[str, str]:
    found = h2.HeaderReader().begin(1, flags, block)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_no_log_tells_what_headers_say(caplog: pytest.LogCaptureFixture, is_indexed: bool) -> None:
    """Callers show the cluster's token in them."""
    fields = {TOKEN_HEADER: "secret"}
    with caplog.at_level(logging.DEBUG):
        block = Encoder().encode(fields) if is_indexed else block_of(h2.headers(1, fields.items()))
        caplog.clear()
        assert read(block) == fields
    assert not caplog.records


@given(st.dictionaries(names, values, max_size=6))
def test_our_headers_are_read_as_they_were_written(fields: dict[str, str]) -> None:
    assert read(block_of(h2.headers(1, fields.items()))) == fields


@given(st.lists(st.dictionaries(names, values, max_size=6), max_size=4), st.integers(1, 50))
def test_blocks_of_other_encoders_in_pieces(blocks: list[dict[str, str]], size: int) -> None:
    """Huffman codes and a table that grows from block to block, as clients of gRPC have them."""
    encoder, reader = Encoder(), h2.HeaderReader()
    for fields in blocks:
        block = encoder.encode(list(fields.items()), huffman=True)
        pieces = [block[i : i + size] for i in range(0, len(block), size)] or [b""]
        found = reader.begin(
            1, h2.END_STREAM | (h2.END_HEADERS if len(pieces) == 1 else 0), pieces[0]
        )
        for i, piece in enumerate(pieces[1:], start=2):
            assert found is None and reader.is_waiting
            found = reader.go_on(1, h2.END_HEADERS if i == len(pieces) else 0, piece)
        assert found == (fields, True) and not reader.is_waiting


@given(st.binary(max_size=60))
def test_noise_in_a_header_block_is_read_or_refused(noise: bytes) -> None:
    try:
        fields = read(noise)
    except h2.H2Error:
        return
    assert all(isinstance(value, str) for value in fields.values())


def test_header_blocks_are_bounded() -> None:
    reader = h2.HeaderReader()
    with pytest.raises(h2.H2Error, match="too long"):
        reader.begin(1, 0, bytes(10_000))
        reader.go_on(1, 0, bytes(10_000))
    with pytest.raises(h2.H2Error, match="without a beginning"):
        h2.HeaderReader().go_on(1, h2.END_HEADERS, b"")


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


def test_settings_and_windows() -> None:
    settings = {h2.Setting.MAX_FRAME_SIZE: 1 << 20, h2.Setting.INITIAL_WINDOW_SIZE: 5}
    assert dict(h2.parse_settings(block_of(h2.settings_frame(settings)))) == settings
    assert h2.parse_window_update(block_of(h2.window_update(3, 77))) == 77
    for wrong in (b"", b"\0\0\0\0", b"\0\0\0\1\0"):
        with pytest.raises(h2.H2Error):
            h2.parse_window_update(wrong)
    with pytest.raises(h2.H2Error):
        h2.parse_settings(b"12345")


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
            fields = read(bytes(data[9 : 9 + length]))
            assert fields[":path"] == "/service/Call" and fields["te"] == "trailers"
        data = data[9 + length :]
    assert body == b"\0" + len(message).to_bytes(4) + message
    assert kinds[0] == (h2.FrameKind.HEADERS, False)
    assert [ends for _, ends in kinds] == [False] * (len(kinds) - 1) + [True]
