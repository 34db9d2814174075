"""Turns token ids into text, one by one, and finds stop strings.

`Detokenizer` never gives half a character and never takes a character back. It decodes a short
window of the last tokens again with each token and gives what is new at the end of the text:

        tokens   ... a b c | d e f g         window: everything after |
        text of the window  "the cat s"      of it already given: "the ca"
                                             given now: "t s"

A window may end inside a character, which then decodes to U+FFFD; tokenizers with byte tokens
even show the complete characters before it so, as far as they consist of bytes. Such an end is
kept back until the character is complete. Where the text is complete the window may begin anew.
A text that goes on with another begins with a window of that one's last tokens, all of it given.

`StopStringMatcher` keeps back text that may turn out to be the beginning of a stop string. Both
give the same text however the tokens arrive: alone, in groups, or all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.frontend.text_options import PLAIN_TEXT, TextOptions

REPLACEMENT = "\ufffd"
WINDOW = 16
"""Tokens in the window before it begins anew, and of a text before it."""
_MAX_WINDOW = 64
"""Tokens after which a window without any complete text is no text, so that nobody waits for its
end."""


class Decoder(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str: ...


class Detokenizer:
    """Forms the text of one request's output, piece by piece. `before` are the tokens of a text
    that it goes on with."""

    def __init__(
        self, decoder: Decoder, options: TextOptions = PLAIN_TEXT, before: Sequence[int] = ()
    ) -> None:
        self._decoder = decoder
        self._options = options
        self._window = list(before)
        text = self._decode(self._window) if self._window else ""
        if text.endswith(REPLACEMENT):
            self._window, text = [], ""  # Nobody knows whether a character is open there.
        self._num_given = len(text)
        """Characters of the window's text that were given already."""
        self._anchor = len(self._window)
        """Tokens of the window at whose end the text was complete before the last one."""

    def push(self, token_id: int) -> str:
        """Takes one token and returns the new text, possibly none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            if len(self._window) <= _MAX_WINDOW:
                return self._take(text, len(text.rstrip(REPLACEMENT)))
            new = self._take(text, len(text))
            self._window, self._num_given, self._anchor = [], 0, 0
            return new
        new = self._take(text, len(text))
        if len(self._window) > WINDOW:
            self._begin_anew(text)
        self._anchor = len(self._window)
        return new

    def flush(self) -> str:
        """Returns what was kept back: no more tokens will come, or none that complete it."""
        text = self._decode(self._window)
        rest = self._take(text, len(text))
        if rest:
            self._window, self._num_given, self._anchor = [], 0, 0
        return rest

    def _take(self, text: str, stop: int) -> str:
        new = text[self._num_given : stop]
        self._num_given = max(self._num_given, stop)
        return new

    def _begin_anew(self, text: str) -> None:
        """Drops tokens before the anchor. What is left must show some text: decoders strip a
        space at the beginning, so an invisible token there would swallow the next one's."""
        rest = self._window[self._anchor :]
        rest_text = self._decode(rest)
        if rest_text and text.endswith(rest_text):
            self._window = rest
            self._num_given = len(rest_text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(
            token_ids,
            skip_special_tokens=self._options.skip_special_tokens,
            spaces_between_special_tokens=self._options.spaces_between_special_tokens,
        )


class StopStringMatcher:
    """Cuts text before the first stop string that becomes complete, or behind it (`keeps_match`).

    If two become complete with the same character, the longer one counts. `matched` names it;
    after that nothing more is given.
    """

    def __init__(self, stop: tuple[str, ...], *, keeps_match: bool = False) -> None:
        self._stop = tuple(sorted(stop, key=len, reverse=True))
        self._keeps_match = keeps_match
        self._kept = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes text and returns what is certainly no part of a stop string."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        text = self._kept + text
        if cut := self._find(text):
            start, self.matched = cut
            self._kept = ""
            return text[: start + len(self.matched)] if self._keeps_match else text[:start]
        keep = self._num_to_keep(text)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns what was kept back: no more text will come."""
        kept, self._kept = self._kept, ""
        return kept

    def _find(self, text: str) -> tuple[int, str] | None:
        """Returns (start, stop string) of the one that ends first."""
        found = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if not found:
            return None
        _, start, stop = min(found, key=lambda match: match[:2])
        return start, stop

    def _num_to_keep(self, text: str) -> int:
        """Returns the length of the longest end of `text` with which a stop string begins."""
        longest = min(len(self._stop[0]) - 1, len(text))
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
