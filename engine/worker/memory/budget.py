"""The use of a GPU's memory: measured once, when a worker starts, and logged.

    total · share  =  held  +  step  +  reserve  +  KV cache

Others may use the same GPU: what they hold is not ours, but it cannot be had either.
"""

from __future__ import annotations

from dataclasses import dataclass

from host.memory import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The budget of one worker. All but `share` is in bytes.

    Attributes:
        total: What the GPU has.
        share: The part of it that this worker may use, 0 to 1.
        free: What nothing has taken, once the weights are loaded.
        held: Weights, and tables of all rows.
        step: What the largest step takes besides, at its peak.
        reserve: For what is not seen before it is there: contexts, CUDA graphs, NCCL.
    """

    total: int
    share: float
    free: int
    held: int
    step: int
    reserve: int

    @property
    def kv_cache(self) -> int:
        """Returns what is left for the cache."""
        allowed = int(self.total * self.share) - self.held - self.step - self.reserve
        return max(0, min(allowed, self.free - self.step - self.reserve))

    def __str__(self) -> str:
        return (
            f"of the GPU's {format_bytes(self.total)} this worker may use {self.share:g}, and "
            f"{format_bytes(self.free)} are free: {format_bytes(self.held)} hold the model and the "
            f"tables of requests, {format_bytes(self.step)} are for the largest step, "
            f"{format_bytes(self.reserve)} for contexts and graphs, "
            f"{format_bytes(self.kv_cache)} for the KV cache"
        )
