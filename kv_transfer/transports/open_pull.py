"""One PullKV call on the producer's side, whatever transport it asks for."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from edge.h2.out_message import OutMessage
from kv_transfer.planes import PageShape
from kv_transfer.wire.chunk_grid import ChunkGrid
from kv_transfer.wire.pull_spec import PullSpec


@dataclass(frozen=True, slots=True)
class PullTerms:
    """The terms that follow from a request.

    Attributes:
        share: What the puller takes of each block, by group.
        num_pullers: Calls that carry each chunk, this one included, by group.
        grid: That of its tokens. Chunks have the same indices as in the export's.
        layers: Those that are wanted, within each group; None: all.
    """

    spec: PullSpec
    share: tuple[PageShape, ...]
    num_pullers: tuple[int, ...]
    grid: ChunkGrid
    layers: tuple[range, ...] | None = None


class OpenPull(ABC):
    """Knows what the call still wants. `wake` is set when there is more to see."""

    def __init__(self, terms: PullTerms) -> None:
        self.spec = terms.spec
        self.share = terms.share
        self.grid = terms.grid
        self.num_pullers = terms.num_pullers
        self.wake = asyncio.Event()
        self.writes_since: float | None = None
        """A message waits since then for room in the connection."""
        self._wanted = set(
            terms.grid.stripe_of(self.share, self.spec.stream, self.spec.num_streams, terms.layers)
        )
        if self.spec.repeat:
            self._wanted &= self.spec.repeat
        self._chunk_bytes = terms.grid.mean_bytes(self.share)

    @abstractmethod
    def next_message(self) -> OutMessage | None:
        """Returns what is sent next; None: nothing more now. Raises `CorruptChunk` for a repeat of
        what cannot be repeated."""

    @property
    def is_writing(self) -> bool:
        return self.writes_since is not None

    @property
    def is_complete(self) -> bool:
        return not self._wanted

    @property
    def bytes_left(self) -> int:
        """Returns about how much it still wants."""
        return int(len(self._wanted) * self._chunk_bytes)

    def wants(self, index: int) -> bool:
        return index in self._wanted

    def wants_any(self, indices: set[int]) -> bool:
        return not self._wanted.isdisjoint(indices)

    def forget(self, index: int) -> None:
        """It has got the chunk."""
        self._wanted.discard(index)

    def take(self, index: int) -> bool:
        """Returns whether the chunk was wanted; it is not any more."""
        is_wanted = index in self._wanted
        self._wanted.discard(index)
        return is_wanted

    def take_all(self, indices: Sequence[int]) -> list[int]:
        """Returns those of these chunks that were wanted, in their order; they are not any more."""
        taken = [index for index in indices if index in self._wanted]
        self._wanted.difference_update(taken)
        return taken
