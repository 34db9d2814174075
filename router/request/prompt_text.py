"""Is the JSON text of a prompt as it lies in the body, of which nothing long is copied.

A body may be megabytes long, and many arrive at once. What the router has to know of its prompt is
found by scans of these bytes: they are looked at through views, and only pieces are copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import msgspec

_BRACKETS = b" \t\r\n["
_BYTES_PER_TOKEN = 4
_PIECE_BYTES = 64 << 10
_BILLING = re.compile(rb'x-anthropic-billing-header:[^"\\]*')
_BILLING_WITHIN = 512
"""It stands in the first bytes of a system prompt, also where a gateway has made a chat of it."""
_ITEM_ID = re.compile(rb'"id":\s?"(?!call_|toolu_)[a-z]{2,6}_[\w-]{8,64}",?')
"""Codex names each item of an input, in every conversation by other names."""
_OPENING = 64 << 10
"""Conversations have no more in common than this, of what holds such names."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """Has the text of what stands in front of a prompt, and of the prompt itself without the
    brackets that it begins with."""

    preamble: memoryview
    prompt: memoryview

    @classmethod
    def of(cls, preamble: msgspec.Raw, prompt: msgspec.Raw) -> Self:
        return cls(memoryview(preamble), _without_brackets(memoryview(prompt)))

    def __len__(self) -> int:
        return len(self.preamble) + len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Returns a guess: token ids are counted by their commas, text by its length."""
        if self._begins_with_a_digit():
            return sum(piece.count(b",") for piece in self._pieces()) + 1
        return len(self) // _BYTES_PER_TOKEN

    def beginning(self, num_bytes: int) -> bytes:
        """Returns the first `num_bytes` of it, without the line by which Claude Code tells what it
        is, and the names of the first items: they are others in each conversation, and no part of
        what nodes cache."""
        front = self.preamble[:num_bytes]
        prompt = self.prompt[: num_bytes - len(front)]
        opening = _ITEM_ID.sub(b"", prompt[:_OPENING])
        whole = b"".join((front, opening, prompt[_OPENING:]))
        line = _BILLING.search(whole, 0, _BILLING_WITHIN)
        return whole if line is None else whole[: line.start()] + whole[line.end() :]

    def _begins_with_a_digit(self) -> bool:
        text = _without_brackets(self.preamble) or self.prompt
        return bytes(text[:1]).isdigit()

    def _pieces(self) -> Iterator[bytes]:
        for text in (self.preamble, self.prompt):
            for start in range(0, len(text), _PIECE_BYTES):
                yield bytes(text[start : start + _PIECE_BYTES])


def estimate_tokens(prompt: bytes) -> int:
    """Returns the same guess for the JSON text of a prompt, or of all of a request."""
    return PromptText(memoryview(b""), _without_brackets(memoryview(prompt))).num_tokens


def _without_brackets(text: memoryview) -> memoryview:
    if text[:1].tobytes() not in _BRACKETS:
        return text
    for start in range(0, len(text), _PIECE_BYTES):
        if rest := bytes(text[start : start + _PIECE_BYTES]).lstrip(_BRACKETS):
            return text[min(start + _PIECE_BYTES, len(text)) - len(rest) :]
    return text[:0]
