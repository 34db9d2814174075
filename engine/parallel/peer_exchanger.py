"""All-gather and reduce-scatter of tokens over GPU memory that all ranks of a host map, in place of
NCCL.

    1. made over a `MappedMemory`
    2. `measure`: for each number of rows both are timed inside a CUDA graph, and NCCL's; all agree
       on the sums of their times
    3. `gather`, `sum_own_rows`: None where NCCL is quicker
    4. `close`

What is chosen depends on nothing but the rows of a step's largest group, their width and type,
which all ranks know alike.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.parallel.mapped_memory import MAX_BYTES, MappedMemory
from engine.parallel.peer_timing import count_over_ranks, mean_over_ranks, microseconds_in_graph

if TYPE_CHECKING:
    from tandem_kernels.collectives.peer_memory import ReduceTuning

logger = logging.getLogger(__name__)

_SLOT_BYTES = 8
_PAGE_BYTES = 4 << 10


class Library(Protocol):
    """Does the same; `engine.parallel.distributed.Collectives` has it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x` over ranks."""

    def gather_rows(self, x: Tensor) -> Tensor:
        """Gathers every rank's rows, in the order of ranks."""

    def sum_own_rows(self, x: Tensor, rank: int) -> Tensor:
        """Sums `x` over ranks and returns the part of `rank`, this one."""


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """The largest rows of one rank, in bytes, that are gathered, and that are summed; 0: none."""

    gather: int = 0
    scatter: int = 0

    def __str__(self) -> str:
        return (
            f"gathered by writes up to {self.gather} bytes a rank, summed up to {self.scatter}, "
            "by NCCL beyond"
        )


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Microseconds of a call with this many bytes of each rank, by writes and by the library."""

    gather: float
    library_gather: float
    scatter: float
    library_scatter: float


class PeerExchanger:
    """Exchanges rows between the ranks of `memory`.

    Attributes:
        limits: Which rows; before `measure` all that there is room for.
        times: By bytes of one rank's rows, as measured.
    """

    def __init__(self, memory: MappedMemory) -> None:
        self._memory = memory
        self.limits = ExchangeLimits(MAX_BYTES, MAX_BYTES)
        self.times: dict[int, ExchangeTimes] = {}

    def gather(
        self,
        x: Tensor,
        slot_mapping: Tensor,
        num_rows: int,
        tuning: ReduceTuning | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Returns every rank's rows and slots, [ranks * num_rows, H] and [ranks * num_rows], in the
        order of ranks; None: there are too many, or such rows.

        Args:
            x: [T, H] of this rank, at most `num_rows`; zeros in slot -1 are put in place of others.
            slot_mapping: [T] int64.
        """
        from tandem_kernels.collectives.peer_exchange import gathers, peer_gather

        width, itemsize, of_ranks = x.shape[1], x.element_size(), self._memory.of_ranks
        if num_rows * width * itemsize > self.limits.gather:
            return None
        if not gathers(num_rows, width, itemsize, of_ranks):
            return None
        slots = slot_mapping.contiguous()
        return peer_gather(x.contiguous(), slots, num_rows, of_ranks, tuning)

    def sum_own_rows(self, x: Tensor, tuning: ReduceTuning | None = None) -> Tensor | None:
        """Returns [n, ...] of the sum of `x` [ranks * n, ...] over ranks, this rank's rows, in
        float32 in the order of ranks and rounded once; None: there are too many, or such rows."""
        from tandem_kernels.collectives.peer_exchange import peer_scatter, scatters

        if x.numel() * x.element_size() > self.limits.scatter * self._memory.ranks:
            return None
        if not scatters(x, self._memory.of_ranks):
            return None
        return peer_scatter(x.contiguous(), self._memory.of_ranks, tuning)

    def measure(
        self, library: Library, dtype: torch.dtype, hidden_size: int, num_rows: int
    ) -> None:
        """Sets the limits to where the library becomes quicker, for up to `num_rows` rows of
        `hidden_size` numbers of each rank."""
        began, memory = time.monotonic(), self._memory
        mean = partial(mean_over_ranks, library.all_reduce, memory.ranks, memory.device)
        is_right = partial(self._is_right, library=library)
        rows = (
            torch.full((count, hidden_size), memory.rank + 1, dtype=dtype, device=memory.device)
            for count in row_counts(num_rows)
        )
        for x in itertools.takewhile(is_right, rows):
            slots = torch.arange(len(x), device=x.device)
            wide = x.repeat(memory.ranks, 1)
            found = mean(
                microseconds_in_graph(self._gathered, x, slots),
                microseconds_in_graph(partial(_gathered_by, library), x, slots),
                microseconds_in_graph(self._summed, wide),
                microseconds_in_graph(partial(library.sum_own_rows, rank=memory.rank), wide),
            )
            self.times[x.nbytes] = ExchangeTimes(*found)
        self.limits = limits_of(self.times)
        torch.cuda.empty_cache()
        if memory.rank == 0:
            logger.info(
                "exchange of tokens: %s; measured in %.1f s, bytes of a rank: us of gathering by "
                "writes / NCCL, of summing by writes / NCCL: %s",
                self.limits,
                time.monotonic() - began,
                ", ".join(
                    f"{size}: " + "{:.1f} / {:.1f}, {:.1f} / {:.1f}".format(*astuple(of))
                    for size, of in self.times.items()
                ),
            )

    def _gathered(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        found = self.gather(x, slots, len(x))
        assert found is not None, "`_is_right` has asked"
        return found

    def _summed(self, x: Tensor) -> Tensor:
        found = self.sum_own_rows(x)
        assert found is not None, "`_is_right` has asked"
        return found

    def _is_right(self, x: Tensor, library: Library) -> bool:
        """Returns whether there is room for such rows, and all ranks got what they should have;
        the log names others. `x`: rank + 1 everywhere."""
        rank, ranks = self._memory.rank, self._memory.ranks
        slots = torch.arange(len(x), device=x.device)
        gathered = self.gather(x, slots + rank * len(x), len(x))
        of_rank = torch.arange(ranks, device=x.device).repeat_interleave(len(x)).unsqueeze(1)
        summed = self.sum_own_rows(x.repeat(ranks, 1) * (of_rank + 1).to(x.dtype))
        if gathered is None or summed is None:
            return False
        rows, slots_found = gathered
        expected = torch.full_like(summed, (rank + 1) * ranks * (ranks + 1) // 2)
        wrong = (
            (rows != (of_rank + 1).to(x.dtype)).sum()
            + (slots_found != torch.arange(len(rows), device=x.device)).sum()
            + (summed != expected).sum()
        )
        total = count_over_ranks(library.all_reduce, wrong)
        if total and rank == 0:
            logger.warning(
                "the exchange of tokens over shared memory brought %d wrong numbers with %d rows "
                "of each rank, so that NCCL exchanges as many and more; the link between the GPUs "
                "may be at fault",
                total, len(x),
            )  # fmt: skip
        return total == 0

    def close(self) -> None:
        """Unmaps the others' memory. Idempotent."""
        self._memory.close()


def _gathered_by(library: Library, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return library.gather_rows(x), library.gather_rows(slots)


def room_for(ranks: int, num_rows: int, row_bytes: int) -> int:
    """Returns `MappedMemory`'s `max_bytes` for this many rows of every rank: half of the memory
    takes two messages."""
    needed = ranks * num_rows * (row_bytes + _SLOT_BYTES) // 2
    return min(MAX_BYTES, -(-needed // _PAGE_BYTES) * _PAGE_BYTES)


def row_counts(most: int) -> list[int]:
    """Returns the numbers of rows to measure, rising by factors of two to `most`."""
    return sorted({min(1 << power, most) for power in range((most - 1).bit_length() + 1)})


def limits_of(times: dict[int, ExchangeTimes]) -> ExchangeLimits:
    """Returns the limits for measured times by size: writes are used up to the last size before
    the library is quicker."""

    def last(is_quicker: Callable[[ExchangeTimes], bool]) -> int:
        won = itertools.takewhile(lambda size: is_quicker(times[size]), sorted(times))
        return max(won, default=0)

    return ExchangeLimits(
        last(lambda of: of.gather < of.library_gather),
        last(lambda of: of.scatter < of.library_scatter),
    )
