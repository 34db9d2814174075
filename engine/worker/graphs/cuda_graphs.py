"""CUDA graphs of decode steps and of prompts: one launch instead of hundreds.

    1. `capture`    once, when all memory that steps touch has its address: for each key, largest
                    batch first, the work runs once (kernels are compiled, libraries choose their
                    algorithms) and then once more to be recorded
    2. `launches`   is asked for the graph of each step (`engine.contracts.steps.step_launches`)
    3. `replay`

A graph reads and writes fixed addresses only; what it allocates while it runs comes from one pool
that all graphs share, because only one runs at a time. Sizes in between are padded with requests
that are none's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.contracts.errors import CannotStartError
from engine.contracts.steps.step_launches import GraphKey, StepLaunches

logger = logging.getLogger(__name__)


class GraphCaptureError(CannotStartError):
    """A step cannot be recorded. Names it, the cause, and how to do without."""


class CudaGraphManager:
    """Records and launches.

    Args:
        launches: Which steps there are graphs of.
        adapters: The values of `GraphKey.adapters` that there are.
        has_drafter: A drafter's passes are recorded, too, for batches of the same sizes.
    """

    def __init__(
        self,
        launches: StepLaunches,
        device: torch.device,
        adapters: Sequence[bool] = (False,),
        has_drafter: bool = False,
    ) -> None:
        self.launches = launches
        self.has_drafter = has_drafter
        self._adapters = adapters
        self._device = device
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    @property
    def keys(self) -> list[GraphKey]:
        """Returns all graphs, in the order in which they are recorded."""
        keys = self.launches.keys
        found = [key._replace(adapters=adapters) for adapters in self._adapters for key in keys]
        return found + (self.launches.draft_keys if self.has_drafter else [])

    @property
    def most_places(self) -> int:
        """Returns the most places at which any graph chooses tokens."""
        return max(key.num_reqs * key.width for key in self.keys)

    def capture(self, run: Callable[[GraphKey], None], report: Callable[[float], None]) -> None:
        """Records `run(key)` for all keys. `report` is called with fractions in 0..1.

        Raises:
            GraphCaptureError: Something in `run` cannot be recorded.
            torch.OutOfMemoryError: The graphs do not fit.
        """
        keys = self.keys
        started, reserved = time.monotonic(), torch.cuda.memory_reserved(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        for index, key in enumerate(keys):
            report(index / len(keys))
            try:
                self._graphs[key] = _record(run, key, stream, pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                what = str(error).partition("\n")[0]
                raise GraphCaptureError(
                    f"the CUDA graph of {key.describe()} could not be recorded: {what}; start "
                    f"with enforce_eager, or with {key.how_to_leave_out}"
                ) from error
        torch.cuda.synchronize(self._device)
        report(1.0)
        logger.info(
            "recorded %d CUDA graphs, %d of steps with prompts, in %.1f s; they take %.0f MiB",
            len(keys),
            len(self._adapters) * len(self.launches.prompts),
            time.monotonic() - started,
            (torch.cuda.memory_reserved(self._device) - reserved) / (1 << 20),
        )

    def replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()


def _record(
    run: Callable[[GraphKey], None],
    key: GraphKey,
    stream: torch.cuda.Stream,
    pool: Any,
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(key)
        stream.synchronize()
        # Other threads, like those that watch over collectives, may go on calling CUDA.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run(key)
        except BaseException:
            # The end of a capture that has failed fails, too, and says less.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
