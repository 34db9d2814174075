"""All-reduce of small messages over GPU memory that all ranks of a host map, in place of NCCL.

1. made over a `MappedMemory`
2. `measure`: for each size, what is quickest is timed inside a CUDA graph; all agree on the
   sums of their times
3. `reduce`, `reduce_norm`: None where NCCL is quicker, or what follows is done by itself
4. `close`
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.parallel.mapped_memory import MAX_BYTES, MappedMemory
from engine.parallel.peer_timing import (
    AllReduce,
    count_over_ranks,
    mean_over_ranks,
    microseconds_in_graph,
)

if TYPE_CHECKING:
    from tandem_kernels.collectives.peer_memory import ReduceTuning

logger = logging.getLogger(__name__)

_LEAST_BYTES = 4 << 10
_LEAST_ROOM = 4 << 20
_NORM_BYTES = 1 << 20
"""Larger messages have their norms in a launch behind them: by itself one launch is quicker up to 4
MiB, but in a step, behind GEMMs, it loses from 2 MiB on (10.07 ms of 256 rows, and 9.88)."""
_NOISE = 1.03


@dataclass(frozen=True, slots=True)
class ReduceLimits:
    """The largest messages, in bytes, that are summed in one shot and in two, and those whose
    residual stream and norm are in the same launch, which has as many shots; 0: none."""

    one_shot: int = 0
    two_shot: int = 0
    norm: int = 0

    @classmethod
    def parse(cls, text: str) -> ReduceLimits:
        """Reads "131072,2097152,524288" or the first two."""
        return cls(*map(int, text.split(",")))

    def within(self, max_bytes: int) -> ReduceLimits:
        """Returns the same for ranks that share room for this many bytes."""
        return ReduceLimits(*(min(limit, max_bytes) for limit in astuple(self)))

    @property
    def largest(self) -> int:
        return max(self.one_shot, self.two_shot)

    def __str__(self) -> str:
        return (
            f"one-shot up to {self.one_shot} bytes, two-shot up to {self.two_shot}, NCCL beyond; "
            f"with the norm behind it up to {self.norm}"
        )


@dataclass(frozen=True, slots=True)
class ReduceTimes:
    """Microseconds of a call with this many bytes: in one shot, in two, and by the library; of the
    sum with residual stream and norm in one launch, and in two or more: 0 where there is no
    choice."""

    one_shot: float
    two_shot: float
    library: float
    with_norm: float
    then_norm: float


class PeerReducer:
    """Sums over the ranks of `memory`.

    Attributes:
        limits: Which messages are summed, and how.
        times: By bytes, as measured.
    """

    def __init__(self, memory: MappedMemory, limits: ReduceLimits | None = None) -> None:
        self._memory = memory
        self.limits = (limits or ReduceLimits(_LEAST_ROOM, MAX_BYTES)).within(memory.max_bytes)
        self.times: dict[int, ReduceTimes] = {}

    def reduce(self, x: Tensor) -> Tensor | None:
        """Returns the sum over ranks; None: the message is too large, or of another type."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes == 0 or num_bytes > self.limits.largest:
            return None
        if not x.is_floating_point() or x.element_size() not in (2, 4):
            return None
        return self.reduce_by(x, two_shot=num_bytes > self.limits.one_shot)

    def reduce_by(self, x: Tensor, *, two_shot: bool, tuning: ReduceTuning | None = None) -> Tensor:
        """Returns the sum over ranks of what there is room for, in one shot or in two."""
        from tandem_kernels.collectives.peer_reduce import peer_reduce

        given = x.contiguous().view(-1)
        summed = peer_reduce(given, self._memory.of_ranks, two_shot=two_shot, tuning=tuning)
        return summed.view(x.shape)

    def reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Returns the norm [T, H] of `residual`, which becomes the sum of itself and of `x` over
        ranks; None, with nothing changed: these are better done one after the other."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes > self.limits.norm:
            return None
        two_shot = num_bytes > self.limits.one_shot
        return self.reduce_norm_at_once(x, residual, weight, eps, two_shot=two_shot)

    def reduce_norm_at_once(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, two_shot: bool
    ) -> Tensor | None:
        """Does the same whatever the limits are; None: there is no room, or such rows."""
        from tandem_kernels.collectives.peer_reduce_norm import peer_reduce_norm, reduces_norm

        if not reduces_norm(x, residual, self._memory.of_ranks):
            return None
        given = x.contiguous(), residual, weight, eps, self._memory.of_ranks
        return peer_reduce_norm(*given, two_shot=two_shot)

    def measure(self, library: AllReduce, dtype: torch.dtype, hidden_size: int) -> None:
        """Sets the limits to where something else becomes quicker. `library`: NCCL's all-reduce;
        `hidden_size`: of rows whose norm may be in the launch."""
        began, device = time.monotonic(), self._memory.device
        candidates = _sizes(self._memory.max_bytes)
        is_right = partial(self._is_right, library=library, dtype=dtype)
        sizes = list(itertools.takewhile(is_right, candidates))

        mean = partial(mean_over_ranks, library, self._memory.ranks, device)
        for size in sizes:
            x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
            ways = self._one_shot, self._two_shot, library
            sums = mean(*(microseconds_in_graph(way, x) for way in ways))
            norms = [0.0, 0.0]
            if size <= _NORM_BYTES:
                norms = mean(*self._norm_times(x, ways[sums.index(min(sums))], hidden_size))
            self.times[size] = ReduceTimes(*sums, *norms)
        self.limits = limits_of(self.times)
        torch.cuda.empty_cache()
        if self._memory.rank == 0:
            logger.info(
                "all-reduce: %s; measured in %.1f s, bytes: us one-shot / two-shot / NCCL, then "
                "with the norm in one launch / by itself: %s",
                self.limits,
                time.monotonic() - began,
                ", ".join(
                    f"{size}: {of.one_shot:.1f} / {of.two_shot:.1f} / {of.library:.1f}, "
                    f"{of.with_norm:.1f} / {of.then_norm:.1f}"
                    for size, of in self.times.items()
                ),
            )

    def _one_shot(self, x: Tensor) -> Tensor:
        return self.reduce_by(x, two_shot=False)

    def _two_shot(self, x: Tensor) -> Tensor:
        return self.reduce_by(x, two_shot=True)

    def _is_right(self, size: int, library: AllReduce, dtype: torch.dtype) -> bool:
        """Returns whether all ranks got the sums that they should have; the log names others."""
        rank, ranks = self._memory.rank, self._memory.ranks
        count = size // dtype.itemsize
        x = torch.full((count,), rank + 1, dtype=dtype, device=self._memory.device)
        expected = ranks * (ranks + 1) // 2
        wrong = sum((way(x) != expected).sum() for way in (self._one_shot, self._two_shot))
        total = count_over_ranks(library, torch.as_tensor(wrong, device=x.device))
        if total and rank == 0:
            logger.warning(
                "all-reduce over shared memory gave %d wrong sums of %d numbers, so that NCCL sums "
                "messages of %d bytes and more; the link between the GPUs may be at fault",
                total, count, size,
            )  # fmt: skip
        return total == 0

    def _norm_times(
        self, x: Tensor, summed: Callable[[Tensor], Tensor], hidden_size: int
    ) -> list[float]:
        """Returns the times of sum, residual stream and norm in one launch, and by themselves, the
        sum by `summed`, whose shots the one launch has."""
        from tandem_kernels import ops

        rows = x[: max(len(x) // hidden_size, 1) * hidden_size]
        if len(rows) < hidden_size:
            rows = x.new_zeros(hidden_size)
        rows = rows.view(-1, hidden_size)
        residual, weight = torch.zeros_like(rows), x.new_ones(hidden_size)
        reduce_norm = partial(self.reduce_norm_at_once, two_shot=summed == self._two_shot)

        def at_once(x: Tensor) -> Tensor:
            normed = reduce_norm(x, residual, weight, 1e-5)
            assert normed is not None, "asked for below"
            return normed

        def by_itself(x: Tensor) -> Tensor:
            normed: Tensor = ops.fused_add_rms_norm(summed(x), residual, weight, 1e-5)[0]
            return normed

        later = microseconds_in_graph(by_itself, rows)
        if reduce_norm(rows, residual, weight, 1e-5) is None:
            return [float("inf"), later]
        return [microseconds_in_graph(at_once, rows), later]

    def close(self) -> None:
        """Unmaps the others' memory. Idempotent."""
        self._memory.close()


def room_for(step_bytes: int) -> int:
    """Returns the bytes of the largest message that ranks share memory for: a power of two."""
    return min(MAX_BYTES, max(_LEAST_ROOM, 1 << (step_bytes - 1).bit_length()))


def _sizes(max_bytes: int) -> list[int]:
    """Returns the bytes of messages to measure, rising by factors of two."""
    return [1 << power for power in range(_LEAST_BYTES.bit_length() - 1, max_bytes.bit_length())]


def limits_of(times: dict[int, ReduceTimes]) -> ReduceLimits:
    """Returns the limits for measured times by size: each way is used up to the last size before
    another one is quicker, the norm in the launch before it is so by more than noise."""
    one_shot = two_shot = norm = before = 0
    for size, of in sorted(times.items()):
        if of.library <= min(of.one_shot, of.two_shot):
            break
        two_shot = size
        if of.one_shot <= of.two_shot and one_shot == before:
            one_shot = size
        is_quick = of.with_norm <= _NOISE * of.then_norm
        if size <= _NORM_BYTES and is_quick and norm == before:
            norm = size
        before = size
    return ReduceLimits(one_shot, two_shot, norm)
