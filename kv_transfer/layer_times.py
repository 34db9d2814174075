"""When each layer of one transfer was computed, and when all of its KV had left the blocks."""

from __future__ import annotations

import time
from itertools import zip_longest

LayerTime = tuple[float, float]
"""A pair (ready, saved) in CLOCK_MONOTONIC seconds, 0.0 for what has not happened. To a puller that
copies blocks itself they are saved when it is notified of them."""

_NOTHING: LayerTime = (0.0, 0.0)


class LayerTimes:
    """Keeps what one process sees: of several steps and chunks of a layer, the last one counts."""

    def __init__(self, num_layers: int) -> None:
        self._ready = [0.0] * num_layers
        self._saved = [0.0] * num_layers

    def ready(self, layer: int) -> None:
        self._ready[layer] = time.monotonic()

    def saved(self, layer: int) -> None:
        self._saved[layer] = time.monotonic()

    @property
    def all(self) -> tuple[LayerTime, ...]:
        return tuple(zip(self._ready, self._saved, strict=True))


def later(a: tuple[LayerTime, ...], b: tuple[LayerTime, ...]) -> tuple[LayerTime, ...]:
    """Returns two processes' views of a model's layers, as one. Either may know fewer of them."""
    pairs = zip_longest(a, b, fillvalue=_NOTHING)
    return tuple((max(one[0], other[0]), max(one[1], other[1])) for one, other in pairs)


def behind_others(times: tuple[LayerTime, ...], num_others: int) -> tuple[LayerTime, ...]:
    """Returns times of layers that are numbered behind `num_others` of other stages."""
    return (_NOTHING,) * num_others + times if times else ()
