"""Cached prefixes that peers pull by hash: who holds their blocks, and until when.

1. `offer`     a peer has named a prompt: of the longest prefix of which all groups of layers have
               what the next token sees, those blocks get a user more, and are exported under a
               transfer of their own, as if that prefix had been computed for the peer
2. loaded      what of it lies in host memory or on disk comes to free blocks first, and the peer
               waits (`jobs_done`). If it is damaged the transfer is called off
3. taken       transfer processes have copied them out: the blocks are free again
4. `ended`     the peer has it all, or wants it no more; or its lease is over

At most one block in eight is held so at a time, and half of the free ones are left alone: requests
come first. On a node with `answers` (decode) only prefixes of answers are given, as long as those
are offered; the names of their smallest blocks tell which they are.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.contracts.prefix_holder import HashChains
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import BlockHash, NamedPrefix
from engine.kv_cache.group_manager import NULL_BLOCK, IsBehind
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.departures.held_blocks import HeldBlocks
from engine.sched.step_fence import StepFence
from kv_transfer.base import HostTier, KVConnectorScheduler
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import BlockIds
from kv_transfer.metadata import KVTransferParams, TransferName

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
    transfer: TransferName
    blocks: list[KVCacheBlock]
    loaded: Sequence[BlockHash] = ()
    """Names of the last blocks, which are being loaded."""
    has_ended: bool = False


@dataclass(slots=True)
class _Prefix:
    """Says what this node has of a prompt: by group, how many leading blocks are not seen any more,
    and the names of the others; of these `lacking` lie behind the cache."""

    num_tokens: int
    groups: list[tuple[int, list[BlockHash]]]
    held: list[KVCacheBlock]
    lacking: list[BlockHash]


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

    def offer(self, chains: HashChains) -> tuple[str, int]:
        """Returns the transfer under which a peer may pull a prefix of the prompt with these
        hashes, and its tokens; 0: none is here."""
        found = self._longest(chains)
        if found is None:
            return "", 0
        pool, size = self._kv_cache.block_pool, self._kv_cache.least_block_size
        pool.touch(found.held)
        fresh = pool.get_new_blocks(len(found.lacking))
        params = KVTransferParams(do_remote_decode=True, transfer_id=secrets.token_hex(16))
        transfer_id, blocks = params.transfer_id, found.held + fresh
        offer = _Offer(
            f"prefix-{transfer_id}", params, found.num_tokens, params.name, blocks, found.lacking
        )
        self._offers[transfer_id] = offer
        self.num_offered_tokens += offer.num_prompt_tokens
        self.num_loaded_tokens += min(found.num_tokens, len(fresh) * size)
        self._connector.update_state_after_alloc(offer, _tables(found, fresh), 0)
        tier = self._connector.host_tier
        if fresh and tier is not None:
            job = tier.load(found.lacking, [block.block_id for block in fresh])
            self._loading[job] = offer
            self._held.hold(job, blocks)
        else:
            self._hold(offer, self._connector.request_finished(offer))
        return transfer_id, offer.num_prompt_tokens

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

    def count(self, chains: HashChains) -> int:
        """Returns how many tokens of a prompt could be offered now."""
        found = self._longest(chains)
        return found.num_tokens if found is not None else 0

    def ended(self, name: TransferName) -> None:
        """Forgets an offer that was taken, given up, or whose lease is over. Blocks that are being
        loaded stay until they are."""
        offer = self._offers.pop(name.transfer_id, None)
        if offer is not None:
            offer.has_ended = True

    def leftovers(self) -> list[str]:
        left = [f"prefix held for a peer by transfer {name}" for name in self._offers]
        return left + [f"prefix being loaded for a peer by job {job}" for job in self._loading]

    def _longest(self, chains: HashChains) -> _Prefix | None:
        """Returns the longest prefix that may be offered: what is here of it, or, where that cannot
        be loaded, what is cached."""
        prefix, most = NamedPrefix(chains), self._most_tokens(chains)
        tier = self._connector.host_tier
        if tier is not None and (found := self._find(prefix, most, self._is_here)) is not None:
            num_loadable = self._num_loadable(tier, found)
            if num_loadable == len(found.lacking):
                return found
            if self._kv_cache.behind.is_chain:
                (_, names), *_ = found.groups
                most = names.index(found.lacking[num_loadable]) * self._kv_cache.least_block_size
                return self._find(prefix, most, self._is_here)
        return self._find(prefix, most, self._is_cached)

    def _most_tokens(self, chains: HashChains) -> int:
        """Returns how many tokens the prompt has by all its hashes, as far as more blocks may be
        held, and those of answers among them."""
        behind = self._kv_cache.behind
        if not self.is_on or any(size not in chains for size in behind.chain_sizes):
            return 0
        most = min(size * len(chains[size]) for size in behind.chain_sizes)
        if (answers := self.answers) is not None:
            size = behind.chain_sizes[0]
            offered = takewhile(lambda name: name in answers, chains[size])
            most = min(most, size * sum(1 for _ in offered))
        held = {**self._offers, **{o.transfer.transfer_id: o for o in self._loading.values()}}
        room = self._kv_cache.num_blocks // _SHARE_HELD - sum(len(o.blocks) for o in held.values())
        return behind.most_seen(max(0, room), most)

    def _find(self, prefix: NamedPrefix, most: int, is_here: IsBehind) -> _Prefix | None:
        behind, pool = self._kv_cache.behind, self._kv_cache.block_pool
        num_tokens = behind.find(prefix, most, is_here)
        if num_tokens == 0:
            return None
        found = _Prefix(num_tokens, behind.names_seen(prefix, num_tokens), [], [])
        for name in (name for _, names in found.groups for name in names):
            block = pool.get_cached_block(name)
            if block is None:
                found.lacking.append(name)
            else:
                found.held.append(block)
        return found if _num_free(found.held) <= self._kv_cache.num_free_blocks else None

    def _is_cached(self, name: BlockHash) -> bool:
        return self._kv_cache.block_pool.get_cached_block(name) is not None

    def _is_here(self, name: BlockHash) -> bool:
        tier = self._connector.host_tier
        return self._is_cached(name) or (tier is not None and tier.tier_of(name) is not None)

    def _num_loadable(self, tier: HostTier, found: _Prefix) -> int:
        """Returns how many of the blocks that lie behind the cache may be loaded, which counts as a
        use of all that are held, too."""
        if not found.lacking:
            return 0
        names = [block.block_hash or b"" for block in found.held] + found.lacking
        room = (self._kv_cache.num_free_blocks - _num_free(found.held)) // 2
        return min(tier.num_found(names[: len(found.held) + room], len(found.held)), room)

    def _hold(self, offer: _Offer, is_needed: bool) -> None:
        """Keeps the blocks until the connector has done with the transfer, if it needs them."""
        if is_needed:
            self._held.hold(offer.transfer, offer.blocks)
        else:
            self._fence.release(offer.blocks)


def _num_free(held: Sequence[KVCacheBlock]) -> int:
    return sum(block.ref_cnt == 0 for block in held)


def _tables(found: _Prefix, fresh: Sequence[KVCacheBlock]) -> BlockIds:
    """Returns the prefix's blocks by group, where `fresh` are those of the names that lack one."""
    held, loaded = iter(found.held), dict(zip(found.lacking, fresh, strict=True))
    return tuple(
        [
            *([NULL_BLOCK.block_id] * num_unseen),
            *((loaded[name] if name in loaded else next(held)).block_id for name in names),
        ]
        for num_unseen, names in found.groups
    )
