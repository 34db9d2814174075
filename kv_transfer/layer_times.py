"""When each layer of one transfer was computed, and when all of its KV had left the blocks."""

from __future__ import annotations

import time

LayerTime = tuple[float, float]
"""A pair (ready, saved) in CLOCK_MONOTONIC seconds, 0.0 for what has not happened. To a puller that
copies blocks itself they are saved when it is told of them."""


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
    """Returns two processes' views of the same layers, as one."""
    if not a or not b:
        return a or b
    return tuple(
        (max(one[0], other[0]), max(one[1], other[1])) for one, other in zip(a, b, strict=True)
    )
