"""Prefixes that data-parallel groups get from peers, and give to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contracts.messages import PrefixAsk
from engine.contracts.prefix_holder import HashChains
from engine.sched.remote_kv import RemoteKV
from kv_transfer.metadata import KVTransferParams


class GroupPeers:
    """Has of `PeerSource` what the engine core needs, over those of all `groups`. `group_of`
    returns the one that has a request; None: none has."""

    def __init__(
        self, groups: Sequence[RemoteKV], group_of: Callable[[str], RemoteKV | None]
    ) -> None:
        self._groups = groups
        self._group_of = group_of

    def take_asks(self) -> list[PrefixAsk]:
        return [ask for group in self._groups for ask in group.peers.take_asks()]

    def answered(
        self, request_id: str, number: int, params: KVTransferParams | None, num_tokens: int
    ) -> None:
        """Tells the group that asked. Of a request that has ended, any lets the peer's blocks
        go."""
        group = self._group_of(request_id) or self._groups[0]
        group.peers.answered(request_id, number, params, num_tokens)


class GroupRemote:
    """Has of `RemoteKV` what the engine core needs."""

    def __init__(
        self, groups: Sequence[RemoteKV], group_of: Callable[[str], RemoteKV | None]
    ) -> None:
        self._groups = groups
        self.peers = GroupPeers(groups, group_of)

    def offer(self, chains: HashChains) -> tuple[int, str, int]:
        """Returns the group that has most of this prompt, and what it offers as `PrefixOffers`
        does."""
        counts = [group.offers.count(chains) for group in self._groups]
        best = counts.index(max(counts))
        return best, *self._groups[best].offers.offer(chains)
