"""Finds the labels that a model can answer with as one token.

Prompts of one chat template end alike, so each label is looked at once. A model that lacks pairs
of letters has 700 of them looked at: 27 ms, between which answers go on.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

from decode_node.protocol.decisions.question_texts import labels
from edge.http.event_loop import long_work
from engine.frontend.tokenizer import Tokenizer

_TAIL = 64
"""Characters of a prompt's end that may change how the tokens behind them are cut."""
_PIECE = 8
"""Labels that are looked at before something else may go on."""


async def label_tokens(tokenizer: Tokenizer, prompt: str, count: int) -> dict[str, int]:
    """Returns up to `count` labels, with the token of each where it begins an answer to
    `prompt`."""
    behind = _labels_behind(tokenizer, prompt[-_TAIL:])
    while len(behind.found) < count and behind.look():
        await long_work.pause()
    return dict(islice(behind.found.items(), count))


class _LabelsBehind:
    """Has `found` labels, with their tokens behind the end of a prompt."""

    def __init__(self, tokenizer: Tokenizer, tail: str) -> None:
        self.found: dict[str, int] = {}
        self._tokenizer = tokenizer
        self._tail = tail
        self._before = tokenizer.encode(tail, add_special_tokens=False)
        self._rest = labels()

    def look(self) -> bool:
        """Looks at a few more; returns whether there were any."""
        piece = list(islice(self._rest, _PIECE))
        for label in piece:
            tokens = self._tokenizer.encode(self._tail + label, add_special_tokens=False)
            *same, token_id = tokens
            if same == self._before and token_id not in self.found.values():
                self.found[label] = token_id
        return bool(piece)


@lru_cache(maxsize=32)
def _labels_behind(tokenizer: Tokenizer, tail: str) -> _LabelsBehind:
    return _LabelsBehind(tokenizer, tail)
