"""Journals that decode nodes write for routers, and routers give to other decode nodes; and calls
of tools that models write."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from hypothesis import strategies as st

from decode_node.answer.journal import read_resume
from decode_node.parsers.output_parser import OutputParser
from edge.http.answers.answer_times import read_answer_times
from edge.http.errors import BadRequest
from router.relay.event_buffer import EventBuffer
from router.relay.journal import Journal, JournalEnd
from tests.decode_node.parsers.outputs import FAMILIES, OUTPUTS, TOOLS
from tests.decode_node.parsers.parsing import joined, pieces, random_cuts
from tests.decode_node.parsers.test_calls import parsers_of, tokens_of
from tests.fuzz.damage import HUGE, damaged, documents
from tests.fuzz.target import Fault, Target, judged

# Journals -----------------------------------------------------------------------------------------

_NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "-1", "007", "x", "", " 1", "1e3", "²", *map(str, HUGE)]
)
_LINES = st.one_of(
    st.builds('{} ["tokens",0,[345]]'.format, _NUMBERS.map(": {}".format)),
    st.builds(":& {}".format, _NUMBERS),
    st.builds(":! {}".format, _NUMBERS),
    st.builds(":x {}".format, st.sampled_from(["500", "400", "99999", "-5", "0", "", "abc"])),
    st.sampled_from(
        [
            ":",
            ":.",
            ": ",
            ":t {}",
            ':t {"prompt":1}',
            ":t [[[",
            "data: [DONE]",
            "data: {}",
            'data: {"choices": []}',
            "event: x",
            ": 0",
            ": 1 ",
            "\r",
        ]
    ),
)


@st.composite
def _journals(draw: st.DrawFn) -> bytes:
    """Draws events of lines, the last of which may lack its end."""
    events = draw(st.lists(st.lists(_LINES, min_size=1, max_size=4).map("\n".join), max_size=6))
    return draw(damaged(st.just("\n\n".join([*events, ""]).encode()), 2))


def _check_journal(data: bytes) -> None:
    """A router reads any event, and has something to say to the client at its end."""
    journal, buffer = Journal(), EventBuffer()
    draw = random.Random(len(data))
    at, passed = 0, b""
    while at < len(data) and journal.end is None:
        size = draw.randint(1, 200)
        passed += journal.take(buffer.feed(data[at : at + size]))
        at += size
    read_answer_times(journal.times)
    has_error = journal.end in (JournalEnd.FAILED, JournalEnd.HANDED_OVER)
    if has_error and not 400 <= journal.error_status <= 599:
        raise Fault(f"an error has the status {journal.error_status}")
    body, headers = journal.resume(b"{}", {})
    if journal.next_number and not headers:
        raise Fault("nothing says where the journal begins")
    if len(passed) > 2 * len(data) + 2 or not body.startswith(b"{}"):
        raise Fault("a client is given more than was sent")


_ENTRIES = [
    ["start", 1763700000, [17, 18]],
    ["cached", 0, 128],
    ["tokens", 0, [345]],
    ["tokens", 1, [3, 4]],
    ["numbered", 0, [345], 12],
    ["logprobs", 0, [[[3], [-1.0], 1]]],
    ["end", 0, "stop", None],
    ["end", 1, "length", 5],
    ["usage"],
]


def _check_resume(data: bytes) -> None:
    found = judged(lambda: read_resume(data), BadRequest)
    if found is not None:
        json.dumps([choice.token_ids for choice in found.choices])


# Calls --------------------------------------------------------------------------------------------


@cache
def _texts(family: str) -> list[bytes]:
    return [output.text.encode() for output in OUTPUTS if output.family == family]


@st.composite
def _outputs(draw: st.DrawFn) -> bytes:
    """Draws a byte that names the family, one for cuts, and what the model writes."""
    number = draw(st.integers(0, len(FAMILIES) - 1))
    whole = draw(st.lists(st.sampled_from(_texts(FAMILIES[number])), min_size=1, max_size=2))
    return bytes([number, draw(st.integers(0, 255))]) + draw(damaged(st.just(b"".join(whole)), 4))


@cache
def _parsers(family: str) -> Any:
    return parsers_of(family, tokens_of(family))


def _check_output(data: bytes) -> None:
    """Whatever is written, and however it is cut, is read alike and without an error."""
    if len(data) < 2:
        return
    family = FAMILIES[data[0] % len(FAMILIES)]
    text = data[2:].decode("utf-8", "replace")
    stream = pieces(text, tokens_of(family), size=3)

    def read(pushes: list[list[Any]]) -> Any:
        parser: OutputParser = _parsers(family).parser(TOOLS)
        deltas = [delta for push in pushes for delta in parser.push(push)]
        return joined([*deltas, *parser.finish()])

    whole = read([stream])
    if read(random_cuts(stream, data[1])) != whole:
        raise Fault("another cut is read otherwise")
    json.dumps([whole.reasoning, whole.content, *(call.arguments for call in whole.calls)])


TARGETS = [
    Target(name="journals", inputs=_journals(), check=_check_journal, examples=600),
    Target(name="resumes", inputs=documents(_ENTRIES), check=_check_resume, examples=500),
    Target(name="tool_calls", inputs=_outputs(), check=_check_output, examples=400),
]
