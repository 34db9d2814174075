"""Bounds what rendering one chat template takes: how much text it makes, and for how long.

1. begin    a rendering has a budget of its own, in whatever thread it runs
2. spend    loops, calls and pieces of the output look at the time now and then; whatever makes a
            text says how long it will be before it is made
-  over     `TemplateTooCostly`, whatever the template would have said
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

MAX_TEXT = 16 << 20
"""Characters of one text. No model's context is as long."""
_MAX_ALL = 256 << 20
"""Characters of all texts that are made on the way: templates add to a text again and again."""
_LONG = 1 << 10
_STEPS_A_LOOK = 16


class TemplateTooCostly(Exception):
    """A rendering needs more than its budget has. Says what."""


@dataclass(slots=True)
class TemplateBudget:
    """Is for one rendering. `seconds` are of the processor time of its thread."""

    seconds: float
    ends_at: float = 0.0
    num_steps: int = 0
    num_chars: int = 0

    def step(self) -> None:
        """Counts a step of a loop, or a call. Raises `TemplateTooCostly`."""
        self.num_steps += 1
        if self.num_steps % _STEPS_A_LOOK == 0 and time.thread_time() > self.ends_at:
            raise TemplateTooCostly(f"it takes more than {self.seconds:g} s of processor time")

    def make(self, num_chars: int) -> None:
        """Counts a text that is about to be made. Raises `TemplateTooCostly`."""
        if num_chars < _LONG:
            return
        self.num_chars += num_chars
        if num_chars > MAX_TEXT or self.num_chars > _MAX_ALL:
            raise TemplateTooCostly(f"it makes a text of more than {MAX_TEXT} characters")


_UNBOUNDED = TemplateBudget(float("inf"), float("inf"))
_current: ContextVar[TemplateBudget] = ContextVar("template_budget", default=_UNBOUNDED)


@contextmanager
def rendering_within(seconds: float) -> Iterator[None]:
    """Bounds what is rendered in its block, to `seconds` of processor time."""
    token = _current.set(TemplateBudget(seconds, time.thread_time() + seconds))
    try:
        yield
    finally:
        _current.reset(token)


def budget() -> TemplateBudget:
    """Returns the budget of what is rendered now."""
    return _current.get()
