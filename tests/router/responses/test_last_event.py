"""The last event of a stream is found wherever it is cut, and never in what an answer says."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from router.responses.bodies.input_items import items_of_input
from router.responses.kept_answer import data_of, last_event

LAST = ("response.completed", "response.incomplete", "response.failed")
NAMES = st.sampled_from(("response.output_text.delta", "response.created"))
TEXTS = st.text() | st.just("\n\nevent: response.completed\ndata: {}")


def event(name: str, text: str) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'delta': text})}\n\n".encode()


@given(
    before=st.lists(st.tuples(NAMES, TEXTS)),
    comments=st.booleans(),
    last=st.none() | st.tuples(st.sampled_from(LAST), TEXTS),
)
def test_the_last_event_is_found(
    before: list[tuple[str, str]], comments: bool, last: tuple[str, str] | None
) -> None:
    events = [event(*one) for one in before]
    if comments:
        events.insert(0, b": keep-alive\n\n")
    end = event(*last) if last else b""
    assert last_event(b"".join([*events, end])) == (b"".join(events), end)
    if last:
        assert json.loads(data_of(end)) == {"delta": last[1]}


@given(text=st.text())
def test_a_text_is_one_item_that_says_the_same(text: str) -> None:
    for ascii_only in (True, False):
        given = json.dumps(text, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        (item,) = items_of_input(given)
        assert json.loads(item.data) == {"role": "user", "content": text}
