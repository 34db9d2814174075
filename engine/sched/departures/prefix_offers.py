"""Cached blocks that peers pull by hash: who holds them, and until when.

1. `offer`     a peer has named blocks: those at hand, from the first on without a gap, get a user
               more, and are exported under a transfer of their own
2. loaded      what follows them in host memory or on disk comes to free blocks first, and the peer
               waits (`jobs_done`). If it is damaged the transfer is called off
3. taken       transfer processes have copied them out: the blocks are free again
4. `ended`     the peer has it all, or wants it no more; or its lease is over

At most one block in eight is held so at a time, and half of the free ones are left alone: requests
come first. On a node with `answers` (decode) only blocks of answers are given, as long as those are
offered.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.departures.held_blocks import HeldBlocks
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
    def of(cls, config: KVTransferConfig, num_blocks: int, num_behind: int) -> OfferedAnswers:
        """Returns those of a cache of this many blocks, of which half may be offered, and all of
        those behind it."""
        return cls(num_blocks // 2 + num_behind, config.offer_answers_s)

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
    transfer_id: str
    blocks: list[KVCacheBlock]
    loaded: Sequence[BlockHash] = ()
    """Names of the last blocks, which are being loaded."""
    has_ended: bool = False


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
        self.num_loaded_tokens = 0
        """Counts those that lay in host memory or on disk."""
        self.is_on = is_on
        self._connector = connector
        self._kv_cache = kv_cache
        self._fence = fence
        self._held = held
        self._offers: dict[str, _Offer] = {}
        self._loading: dict[int, _Offer] = {}  # [job]

    def offer(self, names: Sequence[BlockHash]) -> tuple[str, int]:
        """Returns the transfer under which a peer may pull the first of these blocks, and how many
        they are; 0: none is here."""
        pool, size = self._kv_cache.block_pool, self._kv_cache.least_block_size
        names = self._offerable(names)
        found = self._cached(names)
        pool.touch(found)
        loaded = names[len(found) :][: self._num_loadable(names, len(found))]
        if not found and not loaded:
            return "", 0
        fresh = pool.get_new_blocks(len(loaded))
        params = KVTransferParams(do_remote_decode=True, transfer_id=secrets.token_hex(16))
        transfer_id, blocks = params.transfer_id, found + fresh
        offer = _Offer(
            f"prefix-{transfer_id}", params, len(blocks) * size, transfer_id, blocks, loaded
        )
        self._offers[transfer_id] = offer
        self.num_offered_tokens += offer.num_prompt_tokens
        self.num_loaded_tokens += len(loaded) * size
        block_ids = ([block.block_id for block in blocks],)
        self._connector.update_state_after_alloc(offer, block_ids, 0)
        tier = self._connector.host_tier
        if loaded and tier is not None:
            job = tier.load(loaded, [block.block_id for block in fresh])
            self._loading[job] = offer
            self._held.hold(job, blocks)
        else:
            self._hold(offer, self._connector.request_finished(offer))
        return transfer_id, len(blocks)

    def jobs_done(self, jobs: dict[int, bool]) -> None:
        """Lets peers pull what has been loaded; whether it is right, by job."""
        for job, is_right in jobs.items():
            offer = self._loading.pop(job, None)
            if offer is None:
                continue
            self._held.take(job)
            if is_right:
                fresh = offer.blocks[len(offer.blocks) - len(offer.loaded) :]
                self._kv_cache.block_pool.cache_full_blocks(fresh, list(offer.loaded))
            if offer.has_ended:
                self._hold(offer, is_needed=False)
            elif is_right:
                self._hold(offer, self._connector.request_finished(offer))
            else:
                self._hold(offer, self._connector.abort(offer))

    def count(self, names: Sequence[BlockHash]) -> int:
        """Returns how many of the first of these blocks could be offered now."""
        names = self._offerable(names)
        num_cached = len(self._cached(names))
        return num_cached + self._num_loadable(names, num_cached)

    def ended(self, transfer_id: str) -> None:
        """Forgets an offer that was taken, given up, or whose lease is over. Blocks that are being
        loaded stay until they are."""
        offer = self._offers.pop(transfer_id, None)
        if offer is not None:
            offer.has_ended = True

    def leftovers(self) -> list[str]:
        left = [f"prefix held for a peer by transfer {name}" for name in self._offers]
        return left + [f"prefix being loaded for a peer by job {job}" for job in self._loading]

    def _offerable(self, names: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Returns the first of these as far as more may be held, and the answers among them."""
        if not self.is_on:
            return ()
        held = {**self._offers, **{o.transfer_id: o for o in self._loading.values()}}
        room = self._kv_cache.num_blocks // _SHARE_HELD - sum(len(o.blocks) for o in held.values())
        names, answers = names[: max(0, room)], self.answers
        if answers is None:
            return names
        return list(takewhile(lambda name: name in answers, names))

    def _cached(self, names: Sequence[BlockHash]) -> list[KVCacheBlock]:
        pool = self._kv_cache.block_pool
        blocks = map(pool.get_cached_block, names)
        return [block for block in takewhile(lambda block: block is not None, blocks) if block]

    def _num_loadable(self, names: Sequence[BlockHash], start: int) -> int:
        tier = self._connector.host_tier
        if tier is None or start == len(names):
            return 0
        room = self._kv_cache.block_pool.num_free_blocks // 2
        return min(tier.num_found(names[: start + room], start), room)

    def _hold(self, offer: _Offer, is_needed: bool) -> None:
        """Keeps the blocks until the connector has done with the transfer, if it needs them."""
        if is_needed:
            self._held.hold(offer.transfer_id, offer.blocks)
        else:
            self._fence.release(offer.blocks)
