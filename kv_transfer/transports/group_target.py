"""Copies the tokens of one group from blocks of the sender into blocks of ours.

Both sides may have other heads in a page, and other block sizes. Whole blocks that fill blocks of
ours are copied together, in one call for all layers; the rest token run by token run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kv_transfer.layout import KVGroup
from kv_transfer.memory.block_views import BlockViews
from kv_transfer.memory.cache_view import (
    CachePlaces,
    KVCacheView,
    TokenRun,
    copy_blocks,
    copy_runs,
    token_runs,
)
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.memory.page_copy import PageCopy, page_copy
from kv_transfer.metadata import RecvMeta
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.wire.chunk import ByteArray, ChunkHeader, shape_code


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """Blocks of the sender in layers of one group, one entry for each.

    Attributes:
        layers: Within the group.
        numbers: From the start of the prompt.
        places: Physical block ids of the sender, or addresses of the blocks.
    """

    layers: Numbers
    numbers: Numbers
    places: Numbers

    def where(self, choice: npt.NDArray[np.bool_]) -> NamedBlocks:
        return NamedBlocks(self.layers[choice], self.numbers[choice], self.places[choice])


class GroupTarget:
    """One group of one stream. `share` is what a block has on its way, see `KVLayout.share`."""

    def __init__(self, job: FetchJob, group: int, cache: KVCacheView) -> None:
        meta, theirs = job.meta, job.layout.groups[group]
        self.share = share = job.source.share[group]
        self.shape_code = shape_code(share)
        self._group = group
        self._cache = cache
        self._page = cache.pages[group]
        self._source_size = theirs.rows_per_block
        self._rows = self._wanted_rows(meta, theirs)
        self._block_ids = meta.block_ids[group]
        self._block_array = np.array(self._block_ids, np.int64)
        self._num_layers = cache.layout.num_shared_layers(group, meta.peer.layout)
        """Layers behind these are a drafter's that we do not have: they are dropped."""
        self._first_layer = job.first_layer(group)
        """Says where the peer's rank begins to count layers of ours."""

    def _wanted_rows(self, meta: RecvMeta, theirs: KVGroup) -> range:
        """Returns what was asked for. Of a prefix's window all of our first block is taken, as far
        as the first one of the sender has it: so others find it."""
        rows = theirs.rows_to_pull(meta.first_token, meta.num_tokens)
        if not meta.is_prefix or theirs.window is None or not rows:
            return rows
        first = max(
            rows.start - rows.start % size for size in (self._source_size, self._page.block_size)
        )
        return range(max(first, meta.first_token // theirs.compress_ratio), rows.stop)

    def views(self, header: ChunkHeader, views: BlockViews) -> list[memoryview] | None:
        """Returns the blocks of ours that the payload fills exactly; None: it has to be copied."""
        size = self._source_size
        start, stop = header.first_block, header.first_block + header.num_blocks
        is_wanted = self._rows.start <= start * size and stop * size <= self._rows.stop
        layer = self._first_layer + header.layer
        if not is_wanted or self.share != self._page or layer >= self._num_layers:
            return None
        return views.of(self._group, layer, self._block_ids[start:stop])

    def copy_payload(self, header: ChunkHeader, payload: ByteArray) -> None:
        """Issues copies of what was asked for. `payload` may go when this returns."""
        start, size = self._cache.inbox.lend(payload), self.share.num_bytes
        place = np.arange(header.num_blocks)
        layers = np.full_like(place, header.layer)
        blocks = NamedBlocks(layers, header.first_block + place, start + size * place)
        self.copy_compact(blocks, from_host=True)
        self._cache.inbox.copies_issued()

    def copy_compact(self, blocks: NamedBlocks, from_host: bool) -> None:
        """Issues copies of what was asked for out of memory that our device can read. There, at
        `blocks.places`, a block has nothing but `share`."""
        copy = page_copy(self._page, self.share, self.share)
        self._copy(blocks, copy, from_host)

    def copy_from_cache(self, blocks: NamedBlocks, peer: CachePlaces) -> None:
        """Issues copies of what was asked for out of the sender's cache, which is mapped here."""
        sources = peer.pages_of(self._group, blocks.layers, blocks.places)
        copy = page_copy(self._page, peer.pages[self._group], self.share)
        named = NamedBlocks(blocks.layers, blocks.numbers, sources)
        self._copy(named, copy, from_host=False)

    def _copy(self, blocks: NamedBlocks, copy: PageCopy, from_host: bool) -> None:
        """`blocks.places` are addresses."""
        stream = self._cache.copies.stream
        blocks = replace(blocks, layers=self._first_layer + blocks.layers)
        is_ours = blocks.layers < self._num_layers
        if not is_ours.all():
            blocks = blocks.where(is_ours)
        size, whole = self._source_size, blocks
        if size != self._page.block_size:
            copy_runs(stream, copy, self._wanted_runs(blocks))
            return
        first = blocks.numbers * size
        is_whole = (first >= self._rows.start) & (first + size <= self._rows.stop)
        if not is_whole.all():
            whole = blocks.where(is_whole)
            copy_runs(stream, copy, self._wanted_runs(blocks.where(~is_whole)))
        places = self._block_array[whole.numbers]
        targets = self._cache.pages_of(self._group, whole.layers, places)
        copy_blocks(stream, copy, targets, whole.places, from_host)

    def _wanted_runs(self, blocks: NamedBlocks) -> Iterator[tuple[int, TokenRun, int]]:
        """Yields tokens of these blocks that were asked for, as `copy_runs` takes
        them."""
        size, wanted = self._source_size, self._rows
        columns = blocks.layers.tolist(), blocks.numbers.tolist(), blocks.places.tolist()
        for layer, number, source in zip(*columns, strict=True):
            start = max(number * size, wanted.start)
            stop = min((number + 1) * size, wanted.stop)
            for run in token_runs(start, stop, size, self._page.block_size):
                block_id = self._block_ids[run.target_block]
                target = self._cache.page_of(self._group, layer, block_id)
                yield source, run, target
