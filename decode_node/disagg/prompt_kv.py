"""The KV of one prompt, on one path after the other; and how soon the prompt would be done here.

1. `objection`   may it come from that node?
2. `began`       a node was chosen
3. `longest_s`   it is waited for this long after the first token, and no longer
4. `arrived`, `failed` or `closed`
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from decode_node.disagg.kv_paths import KV_LATE, KVPaths
from edge.standstill import is_done_within
from kv_transfer.metadata import TransferStats

T = TypeVar("T")

_DISTURBANCE = 1.3
"""A prompt takes this much longer between decode steps, and makes others' tokens wait."""
_PATIENCE = 1.5
_STEPS = 8


class KVIsLate:
    """The KV has not come in the time in which it had to."""


class LocalSpeed:
    """Estimates how long prompts take on this node: by its own steps, and before there were any by
    what prefill nodes say of theirs."""

    def __init__(self) -> None:
        self._remote_tokens_per_s = 0.0

    def note_remote(self, num_tokens: int, seconds: float) -> None:
        """Learns that a prefill node computed this many tokens."""
        if num_tokens > 0 and seconds > 0:
            seen, known = num_tokens / seconds, self._remote_tokens_per_s
            self._remote_tokens_per_s = known + (seen - known) / 4 if known else seen

    def seconds(self, num_tokens: int, own_tokens_per_s: float) -> float:
        """Returns how long this many take; infinite if nothing knows."""
        rate = own_tokens_per_s or self._remote_tokens_per_s
        return _DISTURBANCE * num_tokens / rate if rate else math.inf


@dataclass(slots=True)
class PromptKV:
    """Follows the KV of a transfer `name`. `num_bytes` are to be pulled, or `num_tokens` to be
    computed here. KV is waited for `patience_s` at least: hosts are busy, and shorter waits say
    nothing of a path."""

    paths: KVPaths
    speed: LocalSpeed
    name: str
    num_bytes: int
    num_tokens: int
    own_tokens_per_s: float
    patience_s: float
    is_local_possible: bool = True
    """Without an encoder here, images need a prefill node whatever its path."""
    _address: str = ""
    _remote_s: float = 0.0

    @property
    def local_s(self) -> float:
        if not self.is_local_possible:
            return math.inf
        return self.speed.seconds(self.num_tokens, self.own_tokens_per_s)

    @property
    def longest_s(self) -> float:
        return max(self.patience_s, _PATIENCE * self.local_s)

    def objection(self, address: str) -> str:
        """Returns a code of `KVPaths.objection`."""
        if not (self.num_bytes and self.is_local_possible):
            return ""
        return self.paths.objection(address, self.num_bytes, self.local_s)

    def began(self, address: str) -> None:
        self.closed()
        self._address = address
        if self.num_bytes:
            self.paths.began(address, self.name, self.num_bytes)

    async def in_time(self, coming: Coroutine[Any, Any, T]) -> T | KVIsLate:
        """Returns what comes, if it does in `longest_s`, in which this process ran."""
        longest_s = self.longest_s
        if math.isinf(longest_s):
            return await coming
        task = asyncio.create_task(coming)
        try:
            is_here = await is_done_within(longest_s, _STEPS, task)
            return task.result() if is_here else KVIsLate()
        finally:
            task.cancel()
            del task  # Its error holds this frame, which must not hold the error.

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Notes that the prefill node has computed this many tokens of the prompt."""
        self.speed.note_remote(num_tokens, seconds)
        self._remote_s = seconds

    def arrived(self, stats: TransferStats | None) -> None:
        self.paths.arrived(self._address, self.name, stats)

    def failed(self, code: str) -> None:
        waited_s = self._remote_s + self.longest_s if code == KV_LATE else 0.0
        self.paths.failed(self._address, self.name, code, waited_s)

    def closed(self) -> None:
        """Idempotent."""
        self.paths.ended(self._address, self.name)
