"""Counts the requests that are open, and the bytes of those that wait, and keeps room for every
model.

1. arrived    the body is still to come, and with it the name of the model
2. admitted   to a model. It may use all the room that the others do not: half of the room is kept
              for them, in equal parts, used or not
3. waiting    until a node is asked for it: the first time. What it has more than `FREE_BYTES` needs
              room, too, since nothing else bounds what lies here while no node has capacity
4. ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge.http.bodies.body_room import FREE_BYTES
from router.errors import Overloaded


@dataclass(slots=True, kw_only=True)
class OpenRequestLimit:
    """Holds the counts. `models` gives those that exist, `retry_after_s` when to come back."""

    limit: int
    models: Callable[[], Collection[str]]
    retry_after_s: Callable[[], int]
    max_waiting_bytes: int = 8 << 20
    num_open: int = 0
    num_waiting_bytes: int = 0
    _by_model: Counter[str] = field(default_factory=Counter)
    _waiting_bytes: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def track(self) -> Iterator[None]:
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
    def admit(self, model: str) -> Iterator[None]:
        """Counts a request to `model` while this is open. Raises `Overloaded`."""
        if self._by_model[model] >= self._room(model, self.limit, self._by_model):
            raise self._full()
        self._by_model[model] += 1
        try:
            yield
        finally:
            _subtract(self._by_model, model, 1)

    @contextmanager
    def waiting(self, model: str, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Counts a body until what it yields is called, or to the end. Raises `Overloaded`. One
        long body of each model may always wait."""
        counted = max(0, num_bytes - FREE_BYTES)
        used = self._waiting_bytes
        room = self._room(model, self.max_waiting_bytes, used) if counted else 0
        if counted and used[model] and used[model] + counted > room:
            raise self._full_of_bytes()
        used[model] += counted
        self.num_waiting_bytes += counted

        def leave() -> None:
            nonlocal counted
            _subtract(used, model, counted)
            self.num_waiting_bytes -= counted
            counted = 0

        try:
            yield leave
        finally:
            leave()

    def _room(self, model: str, limit: int, used: Counter[str]) -> int:
        others = {*self.models(), *used} - {model}
        if not others:
            return limit
        kept = limit // (2 * (len(others) + 1))
        return limit - sum(max(kept, used[other]) for other in others)

    def _full(self) -> Overloaded:
        return Overloaded(
            "The router has too many open requests. Try again shortly.",
            retry_after_s=self.retry_after_s(),
        )

    def _full_of_bytes(self) -> Overloaded:
        return Overloaded(
            "Long requests wait for nodes, as many as the router keeps (--max-waiting-bytes). Try "
            "again shortly.",
            retry_after_s=self.retry_after_s(),
        )


def _subtract(counts: Counter[str], model: str, count: int) -> None:
    counts[model] -= count
    if not counts[model]:
        del counts[model]
