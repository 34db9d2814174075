"""Keeps how far an answer has come, in words that only decode nodes understand.

A node that is asked for it (`x-tandem-journal: 1`) puts comment lines in front of its events: the
entries of a journal, numbered over the whole life of the answer, whichever nodes give it.

    : 17 ["tokens",0,[345]]      entry 17                              kept here
    data: {...}                  what the entry became                 goes to the client
    :                            a sign of life                        dropped
    :& 3                         this event and the next two are one: all of them, or none
    :t {...}                     where the time went, with the last event: kept here, as it is
    :.                           the answer is complete with the data that follow, if any; `data:
                                 [DONE]` says the same, in APIs that end so
    :! 503 / :x 500              an error follows: another node can go on / nothing can

Life of a journal:

    1. open      `take` strips each event and keeps its entries. An event whose number was there
                 before is dropped; one whose number is too high shows that something was lost
    2. ended     COMPLETE, or FAILED for good; nothing more is taken
    -  broken    HANDED_OVER or GAP, which a line that cannot be read is, too: `resume` makes what
                 the next node needs to go on, 1 again
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from edge.http import headers as names
from edge.http.answers.answer_times import PREFIX as TIMES

MAX_JOURNAL_BYTES = 4 << 20

_MAX_DIGITS = 18
_DONE = b"data: [DONE]"
_COMPLETE = b":."
_GROUP = b":& "


class JournalEnd(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"
    HANDED_OVER = "handed_over"
    GAP = "gap"


class _Garbled(Exception):
    """A line is none that decode nodes write."""


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise _Garbled
    return int(digits)


class Journal:
    """Holds the entries. `next_number` is to come; `end` says why there is nothing more to take
    now. `error`: the event of the client's that tells of an error, and its HTTP status."""

    __slots__ = (
        "_entries", "_group", "_num_missing", "end", "error", "error_status", "is_too_long",
        "next_number", "times",
    )  # fmt: skip

    def __init__(self) -> None:
        self._entries = bytearray()
        self._group: list[bytes] = []
        """Holds events whose group is not complete yet: their node may not live to send the
        rest."""
        self._num_missing = 0
        self.next_number = 0
        self.end: JournalEnd | None = None
        self.error = b""
        self.error_status = 0
        self.is_too_long = False
        self.times = b""

    def take(self, events: bytes) -> bytes:
        """Takes whole events off the node; gives what the client gets of them."""
        passed = []
        for event in events.split(b"\n\n"):
            if event and self.end is None:
                try:
                    passed.append(self._take_grouped(event))
                except _Garbled:
                    self.end = JournalEnd.GAP
        return b"".join(passed)

    def resume(self, body: bytes, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
        """Returns body and headers of the request that makes another node go on. With no entry yet
        that is the original one."""
        self.end = None
        self.error = b""
        self._group, self._num_missing = [], 0
        if not self.next_number:
            return body, dict(headers)
        return (
            b"%b[%b]" % (body, bytes(self._entries[:-1])),
            {**headers, names.RESUME: str(len(body))},
        )

    def _take_grouped(self, event: bytes) -> bytes:
        if event.startswith(_GROUP):
            line, _, event = event.partition(b"\n")
            self._num_missing = _number(line.removeprefix(_GROUP))
        if not self._num_missing:
            return self._take_event(event)
        self._group.append(event)
        self._num_missing -= 1
        if self._num_missing:
            return b""
        group, self._group = self._group, []
        return self._take_event(b"\n\n".join(group))

    def _take_event(self, event: bytes) -> bytes:
        is_new = True
        while event.startswith(b":"):
            line, _, event = event.partition(b"\n")
            if line.startswith((b":!", b":x")):
                return self._take_error(line, event)
            if line == _COMPLETE:
                self.end = self.end or JournalEnd.COMPLETE
            elif line.startswith(TIMES):
                self.times = line
            elif line.startswith(b": "):
                is_new = self._take_entry(line) and is_new
        if event == _DONE:
            self.end = self.end or JournalEnd.COMPLETE
        return event + b"\n\n" if event and is_new else b""

    def _take_entry(self, line: bytes) -> bool:
        """Returns False when it must not reach the client (again)."""
        digits, is_there, entry = line[2:].partition(b" ")
        if not is_there:
            raise _Garbled
        number = _number(digits)
        if number == self.next_number:
            self.next_number = number + 1
            self._keep(entry)
            return True
        if number > self.next_number:
            self.end = JournalEnd.GAP
        return False

    def _keep(self, entry: bytes) -> None:
        if self.is_too_long:
            return
        self._entries += entry
        self._entries += b","
        if len(self._entries) > MAX_JOURNAL_BYTES:
            self._entries.clear()
            self.is_too_long = True

    def _take_error(self, line: bytes, event: bytes) -> bytes:
        status = _number(line[2:].strip())
        if not 400 <= status <= 599:
            raise _Garbled
        self.error, self.error_status = event + b"\n\n", status
        if line.startswith(b":!"):
            self.end = JournalEnd.HANDED_OVER
        else:
            self.end = JournalEnd.FAILED
        return b""
