"""Which chunks a transfer consists of, and which stream carries which.

A chunk holds adjacent blocks of one layer. Groups of `blocks_per_chunk` blocks lie at absolute
multiples, so both sides compute the same grid whatever part of the prompt is wanted:

    blocks     0  1  2  3 | 4  5  6  7 | 8  9          blocks_per_chunk = 4, num_blocks = 10
    group         0       |     1      |  2
                     ^ first_block = 2: group 0 holds blocks 2 and 3 only

    index of (layer, group) = layer * num_groups + group

Stream j of S carries the chunks whose index i has i % S == j. Process p of a rank with T
processes stages the chunks with i % T == p, so S is a multiple of the sender's T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """All sizes in blocks of the sender. Blocks before `first_block` are not wanted."""

    num_layers: int
    num_blocks: int
    blocks_per_chunk: int
    first_block: int = 0

    @property
    def num_groups(self) -> int:
        return -(-self.num_blocks // self.blocks_per_chunk)

    @property
    def first_group(self) -> int:
        return min(self.first_block // self.blocks_per_chunk, self.num_groups)

    def starting_at(self, first_block: int) -> ChunkGrid:
        """The same grid with less wanted."""
        return replace(self, first_block=first_block)

    def blocks_of(self, group: int) -> range:
        start = group * self.blocks_per_chunk
        return range(
            max(start, self.first_block), min(start + self.blocks_per_chunk, self.num_blocks)
        )

    def index(self, layer: int, group: int) -> int:
        return layer * self.num_groups + group

    def position(self, index: int) -> tuple[int, int]:
        """(layer, group)."""
        return divmod(index, self.num_groups)

    def stripe(self, stream: int, num_streams: int) -> Iterator[int]:
        """Indices that stream `stream` of `num_streams` carries, in order."""
        stop_group = self.num_groups if self.first_block < self.num_blocks else self.first_group
        groups = range(self.first_group, stop_group)
        for layer in range(self.num_layers):
            yield from self.striped(layer, groups, stream, num_streams)

    def striped(self, layer: int, groups: range, share: int, num_shares: int) -> range:
        """Of adjacent groups in a layer, the indices i with i % `num_shares` == `share`."""
        start = self.index(layer, groups.start)
        first = start + (share - start) % num_shares
        return range(first, self.index(layer, groups.stop), num_shares)


def blocks_per_chunk(chunk_bytes: int, block_bytes: int) -> int:
    """Blocks that make a chunk of about `chunk_bytes`; at least one."""
    return max(1, chunk_bytes // block_bytes)


def num_streams_for(wanted: int, num_bytes: int, chunk_bytes: int, sender_processes: int) -> int:
    """Streams for `num_bytes` from one rank: no more than there are chunks, then rounded up to
    a multiple of the sender's processes, so that each of them is asked for its share."""
    useful = max(1, min(wanted, -(-num_bytes // chunk_bytes)))
    return -(-useful // sender_processes) * sender_processes


def streams_of(num_streams: int, process: int, num_processes: int) -> range:
    """Streams that process `process` of the puller's rank opens."""
    return range(process, num_streams, num_processes)
