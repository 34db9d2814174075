"""Events that come in pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.relay.event_buffer import EventBuffer

_ENDS = (b"\n\n", b"\r\n\r\n")
_PARTS = st.sampled_from([b"a", b"\n", b"\r", b"\n\n", b"\r\n\r\n", b"data: 1"])


@given(st.lists(st.lists(_PARTS, max_size=6).map(b"".join), max_size=12))
def test_what_is_passed_on_ends_where_events_do(pieces: list[bytes]) -> None:
    buffer, passed, came = EventBuffer(), b"", b""
    for piece in pieces:
        came += piece
        passed += buffer.feed(piece)
        assert came.startswith(passed) and (not passed or passed.endswith(_ENDS))
        assert not any(end in came[len(passed) :] for end in _ENDS)
    assert passed + buffer.rest() == came


@pytest.mark.parametrize("end", _ENDS)
def test_a_long_event_takes_time_in_proportion_to_its_length(end: bytes) -> None:
    """Looked through anew with each piece, it would take the better part of a minute."""
    piece, buffer = b"x" * (16 << 10), EventBuffer(64 << 20)
    began_at = time.thread_time()
    for _ in range(2048):
        assert buffer.feed(piece) == b""
    assert len(buffer.feed(end + b"y")) == 2048 * len(piece) + len(end)
    assert time.thread_time() - began_at < 3.0
    assert buffer.rest() == b"y"
