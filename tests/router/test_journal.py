"""The journal takes every event once and in order, however its bytes arrive."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.relay.event_buffer import EventBuffer
from router.relay.journal import MAX_JOURNAL_BYTES, Journal, JournalEnd


def entry(number: int) -> bytes:
    return b': %d ["tokens",0,[%d]]\n' % (number, 100 + number)


def event(number: int) -> bytes:
    return entry(number) + b'data: {"n":%d}\n\n' % number


def data(number: int) -> bytes:
    return b'data: {"n":%d}\n\n' % number


DONE = b"data: [DONE]\n\n"


@given(
    count=st.integers(1, 8),
    cuts=st.lists(st.integers(0, 400)),
    beats=st.lists(st.integers(0, 8)),
    again=st.lists(st.integers(0, 7)),
)
def test_however_it_arrives(
    count: int, cuts: list[int], beats: list[int], again: list[int]
) -> None:
    """Entries arrive with signs of life and repetitions anywhere."""
    sent = b""
    for number in range(count):
        sent += b":\n\n" * beats.count(number) + event(number)
        sent += b"".join(event(old) for old in again if old <= number)
    sent += DONE
    journal, buffer, passed = Journal(), EventBuffer(), b""
    edges = [0, *sorted({cut for cut in cuts if cut < len(sent)}), len(sent)]
    for start, stop in itertools.pairwise(edges):
        passed += journal.take(buffer.feed(sent[start:stop]))
    assert passed == b"".join(data(number) for number in range(count)) + DONE
    assert journal.end is JournalEnd.COMPLETE
    assert journal.next_number == count


@given(count=st.integers(0, 6))
def test_the_next_node_gets_the_body_and_all_entries(count: int) -> None:
    journal = Journal()
    for number in range(count):
        journal.take(event(number))
    body, headers = journal.resume(b'{"prompt":1}', {"a": "b"})
    assert headers["a"] == "b"
    if count == 0:
        assert (body, "x-tandem-resume" in headers) == (b'{"prompt":1}', False)
        return
    offset = int(headers["x-tandem-resume"])
    assert body[:offset] == b'{"prompt":1}'
    assert json.loads(body[offset:]) == [["tokens", 0, [100 + n]] for n in range(count)]


def test_an_api_without_done_says_that_its_last_event_is_the_last() -> None:
    journal, last = Journal(), b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert journal.take(event(0)) == data(0)
    assert journal.end is None
    assert journal.take(b":.\n" + last + event(1)) == last
    assert (journal.end, journal.next_number) == (JournalEnd.COMPLETE, 1)


def test_the_end_of_an_answer_with_a_gap_is_not_believed() -> None:
    journal = Journal()
    journal.take(event(0) + entry(2) + b":.\n" + DONE)
    assert journal.end is JournalEnd.GAP


@pytest.mark.parametrize(
    "line",
    [b": x []", b": 1", b": -1 []", b": " + b"9" * 40 + b" []", b":& x", b":& ", b":& -2",
     b":! x", b":x", b":x 99999", b":! 200", b":x -5"],
)  # fmt: skip
def test_a_line_that_cannot_be_read_ends_what_the_node_may_say(line: bytes) -> None:
    """A node that is broken, or lies, is left for another one; what came before counts."""
    journal = Journal()
    assert journal.take(event(0) + line + b"\ndata: {}\n\n" + event(1)) == data(0)
    assert (journal.end, journal.next_number) == (JournalEnd.GAP, 1)


def test_nothing_behind_a_gap_is_passed_or_kept() -> None:
    journal = Journal()
    assert journal.take(event(0) + event(2) + event(3)) == data(0)
    assert (journal.end, journal.next_number) == (JournalEnd.GAP, 1)


def test_several_entries_of_one_event_are_kept_together() -> None:
    journal = Journal()
    assert journal.take(entry(0) + event(1)) == data(1)
    assert journal.next_number == 2


def test_a_journal_that_grows_too_long_is_given_up_and_the_answer_is_not() -> None:
    journal = Journal()
    big = b': 0 ["tokens",0,[%s]]\ndata: {}\n\n' % (b"1" * MAX_JOURNAL_BYTES)
    assert journal.take(big) == b"data: {}\n\n"
    assert journal.is_too_long
    assert journal.take(event(1)) == data(1)


def test_a_group_of_events_is_taken_whole_or_not_at_all() -> None:
    """Otherwise a client would have a part of what the next node sends again."""
    first, second = b'event: a\ndata: {"n":1}\n\n', b'event: b\ndata: {"n":2}\n\n'
    sent = event(0) + b":& 2\n" + entry(1) + first + second + event(2)
    for cut in range(len(sent)):
        journal, buffer = Journal(), EventBuffer()
        passed = journal.take(buffer.feed(sent[:cut]))
        is_begun, is_whole = cut >= len(event(0)), cut >= len(sent) - len(event(2))
        assert passed == data(0) * is_begun + (first + second) * is_whole
        assert journal.next_number == is_begun + is_whole
        journal.resume(b"{}", {})
        number = journal.next_number
        assert journal.take(event(number)) == data(number), "what was held back is forgotten"


def test_a_group_may_end_an_answer() -> None:
    journal = Journal()
    group = b":& 2\n:.\n" + entry(0) + b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n"
    assert journal.take(group) == b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n"
    assert (journal.end, journal.next_number) == (JournalEnd.COMPLETE, 1)


def test_a_line_of_a_later_release_is_no_entry() -> None:
    journal = Journal()
    assert journal.take(b":~ news\n" + event(0)) == data(0)
    assert (journal.end, journal.next_number) == (None, 1)
