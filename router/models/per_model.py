"""Holds one of something for each model, so that no model's traffic changes another's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

_MAX_MODELS = 1024
"""Names come from clients while not every node has reported."""

T = TypeVar("T")


class PerModel(Generic[T]):
    """Makes one by `make` when a model is asked for first. Of very many the oldest goes: who holds
    it still can."""

    def __init__(self, make: Callable[[str], T]) -> None:
        self._make = make
        self._by_model: dict[str, T] = {}

    def of(self, model: str) -> T:
        found = self._by_model.get(model)
        if found is None:
            if len(self._by_model) >= _MAX_MODELS:
                del self._by_model[next(iter(self._by_model))]
            found = self._by_model[model] = self._make(model)
        return found

    def get(self, model: str) -> T | None:
        """Returns the one of `model` if there is one."""
        return self._by_model.get(model)

    def retain(self, models: Collection[str]) -> None:
        """Forgets all models but these."""
        self._by_model = {name: one for name, one in self._by_model.items() if name in models}

    def __len__(self) -> int:
        return len(self._by_model)

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_model.values())
