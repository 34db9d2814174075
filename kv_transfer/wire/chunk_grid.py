"""Which chunks a transfer consists of, and which stream carries which.

A chunk holds adjacent blocks of one layer of one group, with all of their planes. Spans of
`blocks_per_chunk` blocks lie at absolute multiples, so both sides compute the same grid whatever
part of the prompt is wanted:

    blocks     0  1  2  3 | 4  5  6  7 | 8  9          blocks_per_chunk = 4, num_blocks = 10
    span          0       |     1      |  2
                     ^ first_block = 2: span 0 holds blocks 2 and 3 only

    index of (group, layer, span) = chunks of the groups before + layer * num_spans + span

Layers are counted within their group. Stream j of S carries the chunks whose index i has
i % S == j. Process p of a rank with T processes stages the chunks with i % T == p, so S is a
multiple of the sender's T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from kv_transfer.layout import KVLayout
from kv_transfer.planes import PageShape

MAX_CHUNK_BYTES = 4 << 20
"""A chunk has at most this much KV, unless a single block is larger."""


class ChunkPlace(NamedTuple):
    """The place of a chunk in the grid."""

    group: int
    layer: int
    span: int


@dataclass(frozen=True, slots=True)
class GroupGrid:
    """The chunks of one group. All sizes in blocks of the sender; blocks before `first_block` are
    not wanted."""

    num_layers: int
    num_blocks: int
    blocks_per_chunk: int
    first_block: int = 0

    @property
    def num_spans(self) -> int:
        return -(-self.num_blocks // self.blocks_per_chunk)

    @property
    def first_span(self) -> int:
        return min(self.first_block // self.blocks_per_chunk, self.num_spans)

    @property
    def num_chunks(self) -> int:
        """Counts those that are not wanted too."""
        return self.num_layers * self.num_spans

    @property
    def wanted_spans(self) -> range:
        stop = self.num_spans if self.first_block < self.num_blocks else self.first_span
        return range(self.first_span, stop)

    def blocks_of(self, span: int) -> range:
        """Returns the blocks of a span that are wanted."""
        start = span * self.blocks_per_chunk
        return range(
            max(start, self.first_block), min(start + self.blocks_per_chunk, self.num_blocks)
        )


class ChunkGrid:
    """The chunks of all groups."""

    def __init__(self, groups: tuple[GroupGrid, ...]) -> None:
        self.groups = groups
        self._num_spans = [group.num_spans for group in groups]
        self._starts = list(accumulate((group.num_chunks for group in groups), initial=0))

    @staticmethod
    def of(sender: KVLayout, chunk_bytes: int, first_token: int, num_tokens: int) -> ChunkGrid:
        """Returns the grid of a prompt of `num_tokens` whose puller has `first_token` already. The
        sender's setting `chunk_bytes` says how large a chunk is, about."""
        return _grid_of(sender, chunk_bytes, first_token, num_tokens)

    @property
    def num_chunks(self) -> int:
        return self._starts[-1]

    def mean_bytes(self, share: tuple[PageShape, ...]) -> float:
        """Returns the bytes of a chunk that is wanted, on average, with `share` of each block."""
        num_bytes = num_chunks = 0
        for group, page in zip(self.groups, share, strict=True):
            num_blocks = group.num_blocks - group.first_block
            num_bytes += group.num_layers * max(0, num_blocks) * page.num_bytes
            num_chunks += group.num_layers * len(group.wanted_spans) * (page.num_bytes > 0)
        return num_bytes / max(1, num_chunks)

    def blocks_of(self, place: ChunkPlace) -> range:
        """Returns the blocks of a chunk that are wanted."""
        return self.groups[place.group].blocks_of(place.span)

    def index(self, place: ChunkPlace) -> int:
        group, layer, span = place
        return self._starts[group] + layer * self._num_spans[group] + span

    def position(self, index: int) -> ChunkPlace:
        """Returns the place of a chunk; `index` must be one of the grid."""
        group = 0
        while index >= self._starts[group + 1]:
            group += 1
        layer, span = divmod(index - self._starts[group], self._num_spans[group])
        return ChunkPlace(group, layer, span)

    def layers_and_spans(
        self, indices: Sequence[int]
    ) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Returns the pairs (group, layer) and the pairs (group, span) that occur in these
        chunks."""
        layers: set[tuple[int, int]] = set()
        spans: set[tuple[int, int]] = set()
        for group, num_spans in enumerate(self._num_spans):
            start, stop = self._starts[group], self._starts[group + 1]
            inside = [index - start for index in indices if start <= index < stop]
            layers.update([(group, index // num_spans) for index in inside])
            spans.update([(group, index % num_spans) for index in inside])
        return layers, spans

    def stripe(self, stream: int, num_streams: int) -> Iterator[int]:
        """Returns the indices that stream `stream` of `num_streams` carries, in order."""
        groups = range(len(self.groups))
        return chain.from_iterable(self._stripe_in(group, stream, num_streams) for group in groups)

    def stripe_of(
        self,
        share: tuple[PageShape, ...],
        stream: int,
        num_streams: int,
        layers: Sequence[range] | None = None,
    ) -> Iterator[int]:
        """Returns those of a stripe of which `share`, as `KVLayout.share` gives it, has any
        part. `layers`: of each group, those that are wanted; None: all."""
        groups = [group for group, page in enumerate(share) if page.num_bytes]
        return chain.from_iterable(
            self._stripe_in(group, stream, num_streams, None if layers is None else layers[group])
            for group in groups
        )

    def _stripe_in(
        self, group: int, stream: int, num_streams: int, layers: range | None = None
    ) -> Iterator[int]:
        grid, spans = self.groups[group], self.groups[group].wanted_spans
        return chain.from_iterable(
            self.striped(group, layer, spans, stream, num_streams)
            for layer in (range(grid.num_layers) if layers is None else layers)
        )

    def striped(self, group: int, layer: int, spans: range, share: int, num_shares: int) -> range:
        """Returns, of adjacent spans in a layer, the indices i with i % `num_shares` == `share`."""
        layer_start = self._starts[group] + layer * self._num_spans[group]
        start = layer_start + spans.start
        first = start + (share - start) % num_shares
        return range(first, layer_start + spans.stop, num_shares)


@lru_cache(maxsize=64)
def _grid_of(sender: KVLayout, chunk_bytes: int, first_token: int, num_tokens: int) -> ChunkGrid:
    """All calls of a transfer share one."""
    groups = []
    for group in sender.groups:
        blocks = group.blocks_to_pull(first_token, num_tokens)
        groups.append(
            GroupGrid(
                num_layers=len(group.layers),
                num_blocks=blocks.stop,
                blocks_per_chunk=blocks_per_chunk(chunk_bytes, group.bytes_needed(sender.tp_size)),
                first_block=blocks.start,
            )
        )
    return ChunkGrid(tuple(groups))


def blocks_per_chunk(chunk_bytes: int, block_bytes: int) -> int:
    """Returns how many blocks make a chunk of about `chunk_bytes`; at least one."""
    return max(1, chunk_bytes // block_bytes)


def longest_chunk(layout: KVLayout, chunk_bytes: int) -> int:
    """Returns the bytes of KV in the longest chunk that a rank sends."""
    sizes = [group.bytes_needed(layout.tp_size) for group in layout.groups]
    return max(size * blocks_per_chunk(chunk_bytes, size) for size in sizes)


def num_streams_for(wanted: int, num_bytes: int, chunk_bytes: int, sender_processes: int) -> int:
    """Returns the streams for `num_bytes` from one rank: no more than there are chunks, then
    rounded up to a multiple of the sender's processes, so that each of them is asked for its
    share."""
    useful = max(1, min(wanted, -(-num_bytes // chunk_bytes)))
    return -(-useful // sender_processes) * sender_processes


def streams_of(num_streams: int, process: int, num_processes: int) -> range:
    """Returns the streams that process `process` of the puller's rank opens."""
    return range(process, num_streams, num_processes)
