"""One job of the tiers behind the KV cache, over all transfer processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kv_transfer.tier import LoadMeta, TierJob


@dataclass(slots=True)
class TierTask:
    """Is done when nothing is left in `unanswered`."""

    command: TierJob
    names: list[bytes]
    """Blocks that it is about, by hash."""
    unanswered: set[int]
    damaged: set[int] = field(default_factory=set)
    """Slots."""
    is_lost: bool = False
    """A process has gone with its share."""
    load: LoadMeta | None = None
    """Follows a fetch."""
    is_given_up: bool = False
    """Nothing wants that load any more."""
    unbegun: set[int] = field(default_factory=set)
    """Processes that have no layer of a load yet."""
    begun_at: float = field(default_factory=time.monotonic)

    @property
    def is_right(self) -> bool:
        return not self.is_lost and not self.damaged

    @property
    def whole(self) -> list[bytes]:
        """Returns the blocks of which nothing has complained."""
        if self.is_lost:
            return []
        slots = self.command.slots
        return [n for n, s in zip(self.names, slots, strict=True) if s not in self.damaged]
