"""Holds one of something for each model, so that no model's traffic changes another's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

_MAX_MODELS = 1024
"""Names come from clients while not every node has reported."""

T = TypeVar("T")


class PerModel(Generic[T]):
    """Makes one by `make` when a model is asked for first. Of very many the one goes that was asked
    for longest ago, but none that `is_used`: another one of its model would begin anew."""

    def __init__(
        self, make: Callable[[str], T], is_used: Callable[[T], bool] = lambda one: False
    ) -> None:
        self._make = make
        self._is_used = is_used
        self._by_model: dict[str, T] = {}
        """Begins with what was asked for longest ago."""

    def of(self, model: str) -> T:
        found = self._by_model.pop(model, None)
        if found is None:
            self._make_room()
            found = self._make(model)
        self._by_model[model] = found
        return found

    def _make_room(self) -> None:
        if len(self._by_model) < _MAX_MODELS:
            return
        unused = (name for name, one in self._by_model.items() if not self._is_used(one))
        if (oldest := next(unused, None)) is not None:
            del self._by_model[oldest]

    def get(self, model: str) -> T | None:
        """Returns the one of `model` if there is one."""
        return self._by_model.get(model)

    def retain(self, models: Collection[str]) -> None:
        """Forgets all models but these."""
        self._by_model = {name: one for name, one in self._by_model.items() if name in models}

    def __len__(self) -> int:
        return len(self._by_model)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._by_model.values()))
