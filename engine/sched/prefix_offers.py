"""Cached blocks that peers pull by hash: who holds them, and until when.

1. `offer`     a peer has named blocks: those at hand, from the first on without a gap, get a user
               more, and are exported under a transfer of their own
2. taken       transfer processes have copied them out: the blocks are free again
3. `ended`     the peer has it all, or wants it no more; or its lease is over

At most one block in eight is held so at a time: requests come first. On a node with `answers`
(decode) only blocks of answers are given, as long as those are offered.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.held_blocks import HeldBlocks
from engine.sched.step_fence import StepFence
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams

_SHARE_HELD = 8


class OfferedAnswers:
    """Blocks of conversations whose last answer ended here: at most `max_blocks`, each for
    `seconds` after its last use. Of one conversation the tail goes first."""

    def __init__(self, max_blocks: int, seconds: float) -> None:
        self._max_blocks = max_blocks
        self._seconds = seconds
        self._until: OrderedDict[BlockHash, float] = OrderedDict()

    @classmethod
    def of(cls, config: KVTransferConfig, num_blocks: int) -> OfferedAnswers:
        """Returns those of a cache of so many blocks, of which half may be offered."""
        return cls(num_blocks // 2, config.offer_answers_s)

    def __len__(self) -> int:
        return len(self._until)

    def add(self, names: Sequence[BlockHash]) -> None:
        """Offers a conversation's full blocks, from its first on."""
        now = time.monotonic()
        for name in reversed(names):
            self._until[name] = now + self._seconds
            self._until.move_to_end(name)
        while self._until and (
            len(self._until) > self._max_blocks or next(iter(self._until.values())) <= now
        ):
            self._until.popitem(last=False)

    def __contains__(self, name: BlockHash) -> bool:
        return self._until.get(name, 0.0) > time.monotonic()

    def clear(self) -> None:
        self._until.clear()


@dataclass(slots=True)
class _Offer:
    """As a connector reads a request: its prompt is the prefix."""

    request_id: str
    kv_transfer_params: KVTransferParams | None
    num_prompt_tokens: int
    num_blocks: int


class PrefixOffers:
    """All that this engine holds for peers, by transfer id."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        fence: StepFence,
        held: HeldBlocks,
        answers: OfferedAnswers | None,
        *,
        is_on: bool,
    ) -> None:
        self.answers = answers
        self.num_offered_tokens = 0
        self.is_on = is_on
        self._connector = connector
        self._kv_cache = kv_cache
        self._fence = fence
        self._held = held
        self._offers: dict[str, _Offer] = {}

    def offer(self, names: Sequence[BlockHash]) -> tuple[str, int]:
        """Returns the transfer under which a peer may pull the first of these blocks, and how many
        they are; 0: none is here."""
        found = self._held_of(names)
        if not found:
            return "", 0
        num_tokens = len(found) * self._kv_cache.least_block_size
        params = KVTransferParams(do_remote_decode=True, transfer_id=secrets.token_hex(16))
        offer = _Offer(f"prefix-{params.transfer_id}", params, num_tokens, len(found))
        self._kv_cache.block_pool.touch(found)
        self._offers[params.transfer_id] = offer
        self.num_offered_tokens += num_tokens
        block_ids = ([block.block_id for block in found],)
        self._connector.update_state_after_alloc(offer, block_ids, 0)
        if self._connector.request_finished(offer):
            self._held.hold(params.transfer_id, found)
        else:
            self._fence.release(found)
        return params.transfer_id, len(found)

    def count(self, names: Sequence[BlockHash]) -> int:
        """Returns how many of the first of these blocks could be offered now."""
        return len(self._held_of(names))

    def _held_of(self, names: Sequence[BlockHash]) -> list[KVCacheBlock]:
        pool = self._kv_cache.block_pool
        most = pool.num_blocks // _SHARE_HELD - sum(o.num_blocks for o in self._offers.values())
        found: list[KVCacheBlock] = []
        for name in names[: max(0, most)] if self.is_on else ():
            block = pool.get_cached_block(name)
            if block is None or (self.answers is not None and name not in self.answers):
                break
            found.append(block)
        return found

    def ended(self, transfer_id: str) -> None:
        """Forgets an offer that was taken, given up, or whose lease is over."""
        self._offers.pop(transfer_id, None)

    def leftovers(self) -> list[str]:
        return [f"prefix held for a peer by transfer {name}" for name in self._offers]
