"""Names the calls of an answer.

The same answer has the same names on every node that goes on with it: they are made of what the
journal keeps, and of the place of the call.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_NUM_DIGITS = 24
_NUM_MISTRAL_DIGITS = 9


@dataclass(frozen=True, slots=True)
class CallIds:
    """Names calls in the style that the model's template takes back.

    Attributes:
        answer: What tells this answer from others.
        style: `kimi_k2` counts the calls of the conversation, `mistral` has nine letters and
            digits; everything else is a digest.
        num_before: Calls in the conversation before this answer.
    """

    answer: str
    style: str = ""
    num_before: int = 0

    def name(self, choice: int, index: int, function: str) -> str:
        """Returns the id of call number `index` of a choice."""
        if self.style == "kimi_k2":
            return f"functions.{function}:{self.num_before + index}"
        digest = hashlib.blake2s(f"{self.answer}/{choice}/{index}".encode()).hexdigest()
        if self.style == "mistral":
            return digest[:_NUM_MISTRAL_DIGITS]
        return f"call_{digest[:_NUM_DIGITS]}"
