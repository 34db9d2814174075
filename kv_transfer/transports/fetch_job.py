"""The job of one stream of a transfer says what it shall bring."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.layout import KVLayout, PageShape
from kv_transfer.metadata import RecvMeta


@dataclass(frozen=True, slots=True)
class PullSource:
    """One rank of the peer, and what our `rank` of `tp_size` takes from it.

    Attributes:
        peer_rank: The rank that is asked.
        share: By group, see `KVLayout.share`.
    """

    rank: int
    tp_size: int
    peer_rank: int
    share: tuple[PageShape, ...]


@dataclass(frozen=True, slots=True)
class FetchJob:
    """One stream shall bring this: chunks with index i % `num_streams` == `stream`."""

    meta: RecvMeta
    source: PullSource
    stream: int
    num_streams: int

    @property
    def layout(self) -> KVLayout:
        """Returns the layout of what the peer's rank has: of its stage's layers, if the peer is
        a pipeline of several."""
        return self.meta.peer.layout.of_rank(self.source.peer_rank)

    def first_layer(self, group: int) -> int:
        """Returns which layer of a group, within it, is the first that the peer's rank has."""
        layout = self.meta.peer.layout
        start = layout.first_layer_on(self.source.peer_rank)
        return sum(layer < start for layer in layout.groups[group].layers)
