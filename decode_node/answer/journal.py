"""The journal tells the router, as it happens, what another node needs to continue an answer
exactly.

A router that sends `x-tandem-journal: 1` gets the answer as events, whatever the client asked
for, with comment lines in front of the data:

    : 0 ["start",1763700000,[17,18],"9f2c..."]   when it was created, the seed of each choice, and
                                         a digest of the prompts' tokens
    : 1 ["cached",0,128]                 prompt tokens that choice 0 did not have to compute
    : 2 ["tokens",0,[345]]               choice 0 has one more token
    data: {...}                          and this is all that the client gets of it

    : 9 ["end",0,"stop",null]            choice 0 is complete
    data: {...}

    : 10 ["numbered",0,[345],12]         a token, in APIs that number events: 12 were sent with it
    : 11 ["usage"]                       usage was sent, by the last event
    data: {...}

    :t {"prompt":1234,...}               where the time went, once, with the last event
    data: {...}                          (`edge.http.answers.answer_times`)

    data: [DONE]

    :.                                   the same, where the API has no such event
    :& 2                                 this event and the next are one: both count, or none
    :                                    nothing new, but alone in its event: still working

    :! 503                               this node cannot go on, another one can
    data: {"error": ...}

    :x 500                               nothing can
    data: {"error": ...}

The router takes the lines off, and keeps those with a number without reading them. To continue
elsewhere it posts the original body followed by the entries as one JSON array, with
`x-tandem-resume: <length of the original body>`. Entries of the answer to that go on with the
next number. Tokens are sent with the text that they became, so what the client has seen is always
what the entries amount to; only where each event has all of an answer so far they may be ahead.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from edge.http.errors import BadRequest
from engine.contracts.outputs import TokenLogprobs
from engine.frontend.output_processor import RequestOutput

MAX_RESUME_BYTES = 8 << 20

HEARTBEAT = b":\n\n"
COMPLETE = b":.\n\n"


def group_line(num_events: int) -> bytes:
    """Returns the line in front of events that count only together."""
    return b":& %d\n" % num_events


_FINISH_REASONS = ("stop", "length", "abort", "error")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Start(msgspec.Struct, array_like=True, tag="start"):
    """`prompts` is a `digest_of` them; nodes before 0.2.0 wrote none."""

    created: _Count
    seeds: list[int]
    prompts: str = ""


class Cached(msgspec.Struct, array_like=True, tag="cached"):
    choice: _Count
    num_tokens: _Count


class Tokens(msgspec.Struct, array_like=True, tag="tokens"):
    choice: _Count
    token_ids: list[int]


class NumberedTokens(msgspec.Struct, array_like=True, tag="numbered"):
    """Is `Tokens` in an API that numbers its events, of which this many were sent with these."""

    choice: _Count
    token_ids: list[int]
    num_events: _Count


class Logprobs(msgspec.Struct, array_like=True, tag="logprobs"):
    """Log probabilities of the tokens just sent; only when they are not yet with the client."""

    choice: _Count
    logprobs: list[TokenLogprobs]


class End(msgspec.Struct, array_like=True, tag="end"):
    choice: _Count
    finish_reason: str
    stop_reason: int | str | None


class UsageSent(msgspec.Struct, array_like=True, tag="usage"):
    pass


Entry = Start | Cached | Tokens | NumberedTokens | Logprobs | End | UsageSent

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Entry]).decode


class JournalWriter:
    """Writes the entries of one answer. `keeps_logprobs` says that the client gets nothing before
    the end."""

    def __init__(self, first_number: int = 0, *, keeps_logprobs: bool = False) -> None:
        self._number = first_number
        self._keeps_logprobs = keeps_logprobs
        self._of_all: list[Entry] = []
        self._of_choices: dict[int, list[Entry]] = {}
        self.first_number = first_number

    def start(self, created: int, seeds: list[int], prompts: str) -> None:
        self._of_all.append(Start(created, seeds, prompts))

    def cached(self, choice: int, num_tokens: int) -> None:
        self._of_choice(choice).append(Cached(choice, num_tokens))

    def output(self, choice: int, output: RequestOutput, num_events: int = 0) -> None:
        """Notes an output; `num_events` where events are numbered."""
        entries = self._of_choice(choice)
        if num_events:
            entries.append(NumberedTokens(choice, output.token_ids, num_events))
        elif output.token_ids:
            entries.append(Tokens(choice, output.token_ids))
        if self._keeps_logprobs and output.logprobs:
            entries.append(Logprobs(choice, output.logprobs))
        if output.finish_reason:
            entries.append(End(choice, output.finish_reason, output.stop_reason))

    def usage_sent(self) -> None:
        self._of_all.append(UsageSent())

    def take(self, choice: int | None = None) -> bytes:
        """Returns lines for what was noted of the whole and of `choice`, and not taken yet. What
        other choices have in store waits for a chunk of their own."""
        found = self._of_choices.pop(choice, []) if choice is not None else []
        if self._of_all:
            found, self._of_all = self._of_all + found, []
        return self._line(found[0]) if len(found) == 1 else b"".join(map(self._line, found))

    def _line(self, entry: Entry) -> bytes:
        self._number += 1
        return b": %d %b\n" % (self._number - 1, _encode(entry))

    def _of_choice(self, choice: int) -> list[Entry]:
        return self._of_choices.setdefault(choice, [])


@dataclass(slots=True)
class ResumedChoice:
    """Says where one choice stands."""

    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int | None = None
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Says where an answer stands."""

    created: int
    choices: list[ResumedChoice]
    is_usage_sent: bool
    num_entries: int
    num_events: int = 0
    prompts: str = ""
    """A digest of what the answer has begun behind; empty: nothing says it."""


def digest_of(prompts: Iterable[Sequence[int]]) -> str:
    """Returns what is equal for equal tokens of all prompts, in their order."""
    found = hashlib.blake2b(digest_size=16)
    for token_ids in prompts:
        found.update(len(token_ids).to_bytes(8, "little"))
        found.update(array("q", token_ids))
    return found.hexdigest()


def read_resume(data: bytes) -> Resume:
    """Reads what a router kept. Raises `BadRequest`."""
    try:
        start, *entries = _decode(data)
        if not isinstance(start, Start):
            raise TypeError("no start")
        choices = [ResumedChoice(seed) for seed in start.seeds]
        for entry in entries:
            _apply(entry, choices)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError):
        raise BadRequest("what to resume cannot be read", param="resume") from None
    is_usage_sent = any(isinstance(entry, UsageSent) for entry in entries)
    numbered = [entry.num_events for entry in entries if isinstance(entry, NumberedTokens)]
    return Resume(
        start.created,
        choices,
        is_usage_sent,
        num_entries=1 + len(entries),
        num_events=max(numbered, default=0),
        prompts=start.prompts,
    )


def _apply(entry: Entry, choices: list[ResumedChoice]) -> None:
    match entry:
        case Tokens(choice, token_ids) | NumberedTokens(choice, token_ids):
            choices[choice].token_ids += token_ids
        case Logprobs(choice, logprobs):
            choices[choice].logprobs += logprobs
        case Cached(choice, num_tokens):
            choices[choice].num_cached = num_tokens
        case End(choice, finish_reason) if finish_reason in _FINISH_REASONS:
            choices[choice].end = entry
        case End():
            raise TypeError("no end of an answer")
        case UsageSent():
            pass
        case Start():
            raise TypeError("a second start")
