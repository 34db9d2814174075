"""Marked text: one string in which marker tokens cannot be mistaken for text.

Each marker token is a character that no decoded text can hold, a lone surrogate:

    pieces       "a"  <tool_call>  "b"      →    "a\\ud800b"
    the text     "a<tool_call>b"            →    "a<tool_call>b"      (no marker)

So parsers search strings, and the text that spells a marker is content. A marker whose literal is
no token of the model, or has tokens only in part, is translated as far as it has them and matched
as text otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from engine.frontend.text.pieces import Piece

_FIRST = 0xD800
_MAX_MARKERS = 0x400
_MARKER = re.compile("[\ud800-\udfff]")


class MarkerTokens:
    """The tokens of one model that occur in the literals of its formats."""

    def __init__(self, added_token_ids: Mapping[str, int], literals: Iterable[str]) -> None:
        used = sorted(
            {
                token
                for literal in literals
                for token in added_token_ids
                if len(token) > 1 and token in literal and not token.isspace()
            }
        )[:_MAX_MARKERS]
        self._char_of_id = {added_token_ids[token]: chr(_FIRST + i) for i, token in enumerate(used)}
        self._token_of_char = {chr(_FIRST + i): token for i, token in enumerate(used)}
        self._char_of_token = {token: char for char, token in self._token_of_char.items()}
        self._tokens = re.compile("|".join(map(re.escape, sorted(used, key=len, reverse=True))))
        self.token_ids = frozenset(self._char_of_id)

    def marked(self, piece: Piece) -> str:
        """Returns the marked text of a piece."""
        return piece if isinstance(piece, str) else self._char_of_id.get(piece, "")

    def translate(self, literal: str) -> str:
        """Returns the marked text of a literal, as the model writes it."""
        if not self._char_of_token:
            return literal
        return self._tokens.sub(lambda match: self._char_of_token[match[0]], literal)

    def pieces(self, literal: str) -> list[Piece]:
        """Returns a literal as the model writes it: texts, and the ids of tokens."""
        id_of_char = {char: id_ for id_, char in self._char_of_id.items()}
        parts = re.split(f"({_MARKER.pattern})", self.translate(literal))
        return [id_of_char.get(part, part) for part in parts if part]

    def plain(self, text: str) -> str:
        """Returns marked text with its markers spelled out."""
        if text.isascii():
            return text
        return _MARKER.sub(lambda match: self._token_of_char[match[0]], text)


def has_token(marked: str) -> bool:
    """Says whether marked text has a marker token in it."""
    return _MARKER.search(marked) is not None
