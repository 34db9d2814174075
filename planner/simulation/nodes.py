"""Holds the nodes of the simulated cluster: an engine, a prefix cache, and what they report."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.simulation.engine import SimEngine
from planner.simulation.jobs import Job
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.report import NodeReport

_KV_BLOCK = 16


@dataclass(slots=True)
class PrefixCache:
    """Keeps the most recent `capacity` blocks, each of `block_tokens`."""

    capacity: int
    block_tokens: int
    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        known = itertools.takewhile(self._blocks.__contains__, blocks)
        return self.block_tokens * sum(1 for _ in known)

    def keep(self, blocks: Sequence[int]) -> None:
        """Keeps the blocks of a chain, whose end goes first."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)


@dataclass(slots=True, eq=False)
class SimPrefillNode:
    address: NodeAddress
    cache: PrefixCache
    engine: SimEngine
    num_waiting_tokens: int = 0
    sequence: int = 0
    computed: int = 0
    model: str = "m"
    new_prefixes: list[int] = field(default_factory=list)

    def report(self) -> NodeReport:
        self.sequence += 1
        prefixes, self.new_prefixes = tuple(self.new_prefixes), []
        num_blocks = self.cache.capacity * self.cache.block_tokens // _KV_BLOCK
        engine = self.engine
        return NodeReport(
            node_id=self.address.target,
            role=NodeRole.PREFILL,
            recent_prefixes=prefixes,
            epoch=1,
            sequence=self.sequence,
            num_waiting_requests=len(engine.waiting),
            num_running_requests=len(engine.computing),
            num_idle_requests=sum(
                job.is_idle_class for job in (*engine.waiting, *engine.computing)
            ),
            num_waiting_tokens=self.num_waiting_tokens,
            num_free_blocks=num_blocks,
            num_total_blocks=num_blocks,
            block_size=_KV_BLOCK,
            prefill_tokens_per_s=self.computed / engine.prompt_s if engine.prompt_s else 0.0,
            model_name=self.model,
            fingerprint=self.model,
        )


@dataclass(slots=True, eq=False)
class SimDecodeNode:
    """Is a decode node. It holds `used_tokens` for requests that it has room for; `pending` ones
    wait for it. Without `steps` every request that is held runs."""

    address: NodeAddress
    kv_tokens: int
    cache: PrefixCache
    engine: SimEngine
    used_tokens: int = 0
    num_running: int = 0
    num_idle: int = 0
    sequence: int = 0
    model: str = "m"
    max_sequences: int = 256
    steps: bool = False
    pending: deque[Job] = field(default_factory=deque)

    def _usage(self) -> float:
        return max(self.used_tokens / self.kv_tokens, self.num_running / self.max_sequences)

    def report(self) -> NodeReport:
        self.sequence += 1
        total = self.kv_tokens // _KV_BLOCK
        running = self.engine.num_running if self.steps else self.num_running
        return NodeReport(
            node_id=self.address.target,
            role=NodeRole.DECODE,
            epoch=1,
            sequence=self.sequence,
            num_waiting_requests=len(self.pending) + self.num_running - running,
            num_running_requests=running,
            num_idle_requests=self.num_idle,
            num_waiting_tokens=self.engine.num_waiting_tokens if self.steps else 0,
            slack_tokens_per_s=self.engine.slack.tokens_per_s(self._usage()),
            num_free_blocks=max(0, total - self.used_tokens // _KV_BLOCK),
            num_total_blocks=total,
            block_size=_KV_BLOCK,
            model_name=self.model,
            fingerprint=self.model,
        )
