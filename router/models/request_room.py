"""Counts the requests that are open, and keeps room for every model.

1. arrived    the body is still to come, and with it the name of the model
2. admitted   to a model. It may use all the room that the others do not: half of the room is kept
              for them, in equal parts, used or not
3. ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.errors import Overloaded


@dataclass(slots=True, kw_only=True)
class RequestRoom:
    """Holds the counts. `models` gives those that exist, `retry_after_s` when to come back."""

    limit: int
    models: Callable[[], Collection[str]]
    retry_after_s: Callable[[], int]
    num_open: int = 0
    _by_model: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def arrived(self) -> Iterator[None]:
        """Counts a request while this is open."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def check(self) -> None:
        """Raises `Overloaded` when there is no room for another body."""
        if self.num_open > self.limit:
            raise self._full()

    @contextmanager
    def admitted(self, model: str) -> Iterator[None]:
        """Counts a request to `model` while this is open. Raises `Overloaded`."""
        if self._by_model[model] >= self._room(model):
            raise self._full()
        self._by_model[model] += 1
        try:
            yield
        finally:
            self._by_model[model] -= 1
            if not self._by_model[model]:
                del self._by_model[model]

    def _room(self, model: str) -> int:
        others = {*self.models(), *self._by_model} - {model}
        if not others:
            return self.limit
        kept = self.limit // (2 * (len(others) + 1))
        return self.limit - sum(max(kept, self._by_model[other]) for other in others)

    def _full(self) -> Overloaded:
        return Overloaded(
            "The router has too many open requests. Try again shortly.",
            retry_after_s=self.retry_after_s(),
        )
