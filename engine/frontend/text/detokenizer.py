"""Turns token ids into text, one by one.

`Detokenizer` never gives half a character and never takes a character back. It decodes a short
window of the last tokens again with each token and gives what is new at the end of the text:

        tokens   ... a b c | d e f g         window: everything after |
        text of the window  "the cat s"      of it already given: "the ca"
                                             given now: "t s"

A window may end inside a character, which then decodes to U+FFFD; tokenizers with byte tokens
even show the complete characters before it so, as far as they consist of bytes. Such an end is
kept back until the character is complete. Where the text is complete the window may begin anew.
A text that goes on with another begins with a window of that one's last tokens, all of it given.
The text is the same however the tokens arrive: alone, in groups, or all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.frontend.text.text_options import PLAIN_TEXT, TextOptions

REPLACEMENT = "\ufffd"
WINDOW = 16
"""Tokens in the window before it begins anew, and of a text before it."""
_MAX_WINDOW = 64
"""Tokens after which a window without any complete text is no text, so that nothing waits for its
end."""


class TokenDecoder(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str: ...


class TokenJoiner(Protocol):
    """Forms the text of one request's output."""

    def push(self, token_id: int) -> str:
        """Takes one token and returns the new text, possibly none."""

    def flush(self) -> str:
        """Returns what was kept back: no more tokens will come, or none that complete it."""


class Detokenizer:
    """Forms the text of one request's output, piece by piece. `before` are the tokens of a text
    that it goes on with."""

    def __init__(
        self, decoder: TokenDecoder, options: TextOptions = PLAIN_TEXT, before: Sequence[int] = ()
    ) -> None:
        self._decoder = decoder
        self._options = options
        self._window = list(before)
        text = self._decode(self._window) if self._window else ""
        if text.endswith(REPLACEMENT):
            self._window, text = [], ""  # Nothing knows whether a character is open there.
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
