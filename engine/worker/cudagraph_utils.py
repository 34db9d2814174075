"""CUDA graphs of decode steps: one launch instead of hundreds.

    1. `capture`    once, when all memory that steps touch has its address: for each key, largest
                    batch first, the work runs once (kernels are compiled, libraries choose their
                    algorithms) and then once more to be recorded
    2. `dispatch`   for each decode step: the smallest recorded size that holds the batch, or None
    3. `replay`

A graph reads and writes fixed addresses only; what it allocates while it runs comes from one pool
that all graphs share, because only one runs at a time. Sizes in between are padded with requests
that are nobody's.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
_STEPS = ((64, 8), (256, 16), (512, 32), (1 << 30, 64))
"""(sizes up to, distance between them)"""


class GraphKey(NamedTuple):
    """What one graph computes: a decode step of `num_reqs` requests. `samples`: also their next
    tokens and the advance of their rows; without, it ends with their logits."""

    num_reqs: int
    samples: bool


def default_capture_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """Dense where requests are few and a padded one costs most of a step's time; rising, and
    always with the largest batch."""
    sizes = {*_SMALL_SIZES, max_num_reqs}
    size = 0
    for up_to, distance in _STEPS:
        while size + distance <= min(up_to, max_num_reqs):
            size += distance
            sizes.add(size)
    return tuple(sorted(size for size in sizes if size <= max_num_reqs))


class CudaGraphManager:
    """Records and launches. `capture_sizes`: batch sizes, in any order."""

    def __init__(self, capture_sizes: tuple[int, ...], device: torch.device) -> None:
        self.capture_sizes = sorted(set(capture_sizes))
        self._device = device
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def capture(self, decode: Callable[[GraphKey], None], report: Callable[[float], None]) -> None:
        """Records `decode(key)` for all keys. `report` hears fractions in 0..1."""
        keys = [
            GraphKey(size, samples)
            for size in reversed(self.capture_sizes)
            for samples in (True, False)
        ]
        started, reserved = time.monotonic(), torch.cuda.memory_reserved(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        for index, key in enumerate(keys):
            report(index / len(keys))
            self._graphs[key] = _record(decode, key, stream, pool)
        torch.cuda.synchronize(self._device)
        report(1.0)
        logger.info(
            "recorded %d CUDA graphs for batches of %s in %.1f s; they take %.0f MiB",
            len(keys),
            ", ".join(map(str, self.capture_sizes)),
            time.monotonic() - started,
            (torch.cuda.memory_reserved(self._device) - reserved) / (1 << 20),
        )

    def dispatch(self, num_reqs: int) -> int | None:
        """The size to pad `num_reqs` decodes to; None: no graph is large enough."""
        if not self._graphs:
            return None
        index = bisect.bisect_left(self.capture_sizes, num_reqs)
        return self.capture_sizes[index] if index < len(self.capture_sizes) else None

    def replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()


def _record(
    decode: Callable[[GraphKey], None],
    key: GraphKey,
    stream: torch.cuda.Stream,
    pool: Any,
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        decode(key)
        stream.synchronize()
        # Other threads, like those that watch over collectives, may go on calling CUDA.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            decode(key)
        finally:
            graph.capture_end()
    return graph
