"""A door of tandem through which bytes of others come, and what must hold behind it.

A target draws inputs by structure (Hypothesis) and checks each: what it raises is a fault. Errors
that a door may answer with are taken by `judged`, which looks at their words. Inputs are bytes, so
that one that failed is a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hypothesis.strategies import SearchStrategy

_T = TypeVar("_T")
_MAX_SENTENCE = 4000


class Fault(AssertionError):
    """Something came of an input that may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One door.

    Attributes:
        inputs: Draws what is sent to it.
        check: Takes one input; raises for anything that may not be.
        examples: How many inputs a short run tries.
        max_s: Processor time of one input.
        max_bytes: By how much the process may grow for one input.
    """

    name: str
    inputs: SearchStrategy[bytes]
    check: Callable[[bytes], None]
    examples: int = 300
    max_s: float = 1.0
    max_bytes: int = 64 << 20


def judged(call: Callable[[], _T], *kinds: type[Exception], own_words: bool = True) -> _T | None:
    """Returns what a call returns; None where it raised one of the errors that it may raise, in a
    sentence for whoever has sent the input. Without `own_words` it may be the sender's own."""
    try:
        return call()
    except kinds as error:
        said = str(error)
        is_sentence = " " in said.strip() or not own_words
        if not (is_sentence and len(said) <= _MAX_SENTENCE and said.isprintable()):
            raise Fault(f"{type(error).__name__} is no sentence: {said[:200]!r}") from error
        return None


def same(ours: object, theirs: object, what: str) -> None:
    """Raises `Fault` where a reference says something else."""
    if ours != theirs:
        raise Fault(f"{what}: {str(ours)[:500]!r} here, {str(theirs)[:500]!r} by the reference")
