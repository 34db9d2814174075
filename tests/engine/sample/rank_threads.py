"""Ranks as threads that exchange tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from engine.layers.vocabulary.vocab_part import VocabCut, VocabPart
from engine.parallel.distributed import ParallelGroup

T = TypeVar("T")
_TIMEOUT_S = 60
_UNIT = 64


class _Exchange:
    """Lets `size` ranks meet."""

    def __init__(self, size: int) -> None:
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x.clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class ThreadGroup(ParallelGroup):
    """Rank `rank` of those who meet in `exchange`. `num_bytes`: what it was given to gather."""

    def __init__(self, rank: int, size: int, exchange: _Exchange) -> None:
        super().__init__(0, 1)
        self.rank, self.size = rank, size
        self._exchange = exchange
        self.num_bytes = 0

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x), dim=-1)

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x))

    def _gather(self, x: Tensor) -> list[Tensor]:
        self.num_bytes += x.numel() * x.itemsize
        return self._exchange.gather(self.rank, x)


class Ranks:
    """Plays scenes in `size` threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads = ThreadPoolExecutor(size)

    def play(self, scene: Callable[[ThreadGroup], T]) -> list[T]:
        """Returns what `scene` returned in each rank."""
        exchange = _Exchange(self.size)

        def rank_of(rank: int) -> T:
            try:
                return scene(ThreadGroup(rank, self.size, exchange))
            except BaseException:
                exchange.barrier.abort()
                raise

        return list(self._threads.map(rank_of, range(self.size)))

    def close(self) -> None:
        self._threads.shutdown()


def part_of(logits: Tensor, group: ThreadGroup) -> VocabPart:
    """Returns a rank's part of [S, V]. Columns behind its tokens are larger than all of them."""
    num_rows, vocab_size = logits.shape
    unit = _UNIT * group.size
    width = -(-vocab_size // unit) * _UNIT
    start = group.rank * width
    num_filled = min(width, vocab_size - start)
    assert num_filled > 0
    padded = logits.new_full((num_rows, width), 1e4)
    padded[:, :num_filled] = logits[:, start : start + num_filled]
    return VocabPart(padded, VocabCut(group, start, width, num_filled, vocab_size))
