"""The job of one stream of a transfer says what it shall bring."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.layout import KVLayout
from kv_transfer.metadata import RecvMeta
from kv_transfer.planes import PageShape
from kv_transfer.stages import ALL_LAYERS, positions_of


@dataclass(frozen=True, slots=True)
class PullSource:
    """One rank of the peer, and what our `rank` of `tp_size` takes from it.

    Attributes:
        rank, tp_size: Of our ranks that have the same layers.
        peer_rank: The rank that is asked.
        share: By group, see `KVLayout.share`.
        layers: Those of its layers that we have, counted from its first.
        first_layer: Number in the model of the first layer that we have.
    """

    rank: int
    tp_size: int
    peer_rank: int
    share: tuple[PageShape, ...]
    layers: range = ALL_LAYERS
    first_layer: int = 0


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
        """Returns which layer of ours of a group, within it, is the first that the peer's rank has;
        below 0 if we lack this many of its first ones."""
        layout = self.meta.peer.layout
        theirs, ours = layout.first_layer_on(self.source.peer_rank), self.source.first_layer
        layers = layout.groups[group].layers
        return sum(layer < theirs for layer in layers) - sum(layer < ours for layer in layers)

    @property
    def layers(self) -> tuple[range, ...]:
        """Returns the wanted layers of the peer's rank, within each group."""
        return tuple(positions_of(g.layers, self.source.layers) for g in self.layout.groups)
