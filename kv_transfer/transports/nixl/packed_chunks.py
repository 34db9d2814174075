"""How chunks lie in a slot of a window: one directly behind the other, in the order of the message
that tells of them; of each the blocks in order, and of each block what the puller takes.

Both ends compute it from the grid, the share and the indices, all chunks at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.planes import PageShape
from kv_transfer.wire.chunk_grid import ChunkGrid


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """The blocks of one group in a slot, one entry for each.

    Attributes:
        layers: Within the group.
        numbers: From the start of the prompt, in blocks of the sender.
        offsets: From the start of the slot.
    """

    group: int
    layers: Numbers
    numbers: Numbers
    offsets: Numbers


@dataclass(frozen=True, slots=True)
class _ChunksOfGroup:
    """The chunks of one group, one entry for each. `chosen`: which of all chunks they are."""

    group: int
    chosen: npt.NDArray[np.bool_]
    layers: Numbers
    first_blocks: Numbers
    num_blocks: Numbers


def chunk_sizes(grid: ChunkGrid, share: tuple[PageShape, ...], indices: Numbers) -> Numbers:
    """Returns the bytes that each of these chunks of the grid takes in a slot."""
    sizes = np.zeros(len(indices), np.int64)
    for chunks in _by_group(grid, indices):
        sizes[chunks.chosen] = chunks.num_blocks * share[chunks.group].num_bytes
    return sizes


def packed_blocks(
    grid: ChunkGrid, share: tuple[PageShape, ...], indices: Numbers
) -> list[PackedBlocks]:
    """Returns where every block of these chunks of the grid lies, by group."""
    sizes = chunk_sizes(grid, share, indices)
    starts = np.cumsum(sizes) - sizes
    found = []
    for chunks in _by_group(grid, indices):
        counts = chunks.num_blocks
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found.append(
            PackedBlocks(
                chunks.group,
                np.repeat(chunks.layers, counts),
                np.repeat(chunks.first_blocks, counts) + inside,
                np.repeat(starts[chunks.chosen], counts) + inside * share[chunks.group].num_bytes,
            )
        )
    return found


def num_that_fit(sizes: Numbers, room: int) -> int:
    """Returns how many of the first chunks of these sizes take no more than `room` together."""
    return int(np.searchsorted(np.cumsum(sizes), room, side="right"))


def _by_group(grid: ChunkGrid, indices: Numbers) -> Iterator[_ChunksOfGroup]:
    start = 0
    for number, group in enumerate(grid.groups):
        stop = start + group.num_chunks
        chosen = (indices >= start) & (indices < stop)
        if chosen.any():
            layers, spans = np.divmod(indices[chosen] - start, group.num_spans)
            first = spans * group.blocks_per_chunk
            stops = np.minimum(first + group.blocks_per_chunk, group.num_blocks)
            first = np.maximum(first, group.first_block)
            yield _ChunksOfGroup(number, chosen, layers, first, stops - first)
        start = stop
