"""Remembers the newest call about each adapter, whichever node or router reported it.

    1. unknown     as nodes' settings have it
    2. loaded      a call gave the name an adapter
    3. unloaded    a call took it away; kept, so that a node that was away does not bring it back

Routers that receive the same reports remember the same, in whatever order they come; one that has
just started learns of all calls from nodes that followed them. What nodes report has bounds: of a
name or a model beyond them nothing is learnt, so that none is lost to a node that invents names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from edge.adapter_call import AdapterCall, version_after

_MAX_UNLOADED = 1024
"""Unloaded names of one model that are remembered; those of the oldest calls are forgotten."""


_MAX_NAMES = 8192
_MAX_MODELS = 1024


class AdapterLedger:
    """Holds calls by the model and the name."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, AdapterCall]] = {}
        """Those that were learnt last stand last."""
        self._num_learnt: Counter[str] = Counter()
        self._frozen: dict[str, Mapping[str, AdapterCall]] = {}
        """Copies, of models about which nothing has been learnt since."""

    def learn(self, model: str, calls: Iterable[AdapterCall]) -> bool:
        """Takes in calls, about `model` where they name none, and keeps those that are newer.
        Returns whether there were any."""
        is_new = False
        for given in calls:
            call = given if given.model else replace(given, model=model)
            known = self._known(call)
            old = known.get(call.name)
            if old is None and len(known) >= _MAX_NAMES:
                continue
            if old is None or call.order > old.order:
                known.pop(call.name, None)
                known[call.name] = call
                self._num_learnt[call.model] += 1
                self._frozen.pop(call.model, None)
                is_new = True
                _forget_oldest(known)
        return is_new

    def _known(self, call: AdapterCall) -> dict[str, AdapterCall]:
        """Returns what is known of the call's model; of one too many, a place that is not kept."""
        if call.model not in self._models and len(self._models) >= _MAX_MODELS:
            return {}
        return self._models.setdefault(call.model, {})

    def calls(self, model: str) -> Mapping[str, AdapterCall]:
        """Returns the newest call about each name of a model."""
        return self._models.get(model, {})

    def since(self, model: str, number: int) -> tuple[list[AdapterCall], int]:
        """Returns the calls about a model that were learnt after the first `number`, and perhaps
        others, and how many were learnt until now."""
        num_learnt = self._num_learnt[model]
        newest_first = reversed(self._models.get(model, {}).values())
        return list(islice(newest_first, num_learnt - number)), num_learnt

    def of_models(self, models: Collection[str]) -> list[tuple[str, Mapping[str, AdapterCall]]]:
        """Returns what `calls` has of each of these models now: later calls change none of it."""
        found = []
        for model in self._models:
            if model in models:
                if model not in self._frozen:
                    self._frozen[model] = dict(self._models[model])
                found.append((model, self._frozen[model]))
        return found

    def next_version(self, model: str, name: str) -> int:
        """Returns a version for a call that is newer than all that are known: milliseconds since
        1970, or more."""
        return version_after(self.calls(model).get(name))


def _forget_oldest(known: dict[str, AdapterCall]) -> None:
    """Forgets names that were unloaded long ago, where there are too many."""
    if len(known) > _MAX_UNLOADED:
        unloaded = [call for call in known.values() if not call.digest]
        for call in sorted(unloaded, key=lambda call: call.order)[:-_MAX_UNLOADED]:
            del known[call.name]
