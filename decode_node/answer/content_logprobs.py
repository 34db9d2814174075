"""Finds the log probabilities of the tokens that the content of one choice consists of.

Outputs bring them in the order of tokens, and so do pieces, one for each token. A parser may keep
pieces back: what they become says where they belong.

    tokens  ──▶ waiting ──▶ (a piece is read) ──▶ held ──▶ with content, or with nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from decode_node.parsers.stages.deltas import ContentText, Delta
from engine.contracts.outputs import TokenLogprobs


class ContentLogprobs:
    """Follows one choice."""

    def __init__(self) -> None:
        self._waiting: deque[TokenLogprobs | None] = deque()
        self._held: list[TokenLogprobs] = []

    def add(self, logprobs: Sequence[TokenLogprobs] | None, num_tokens: int) -> None:
        """Takes those of the next tokens. None: another node has sent them."""
        self._waiting += logprobs or [None] * num_tokens

    def attach(self, deltas: list[Delta], num_pieces: int = 1) -> list[Delta]:
        """Returns the deltas of the next pieces, content with its log probabilities."""
        taken = (self._waiting.popleft() for _ in range(min(num_pieces, len(self._waiting))))
        self._held += [one for one in taken if one is not None]
        places = [i for i, delta in enumerate(deltas) if isinstance(delta, ContentText)]
        if places:
            text = deltas[places[-1]]
            deltas[places[-1]] = msgspec.structs.replace(text, logprobs=tuple(self._held))
        if deltas:
            self._held = []
        return deltas
