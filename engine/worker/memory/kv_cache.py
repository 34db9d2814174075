"""Memory of one rank's KV cache: how many blocks, and the tensors themselves.

    1. `engine.kv_cache.capacity` turns a budget into a number of blocks; the executor takes the
       least of all ranks
    2. `KVCache(...)` allocates: on the CPU one memory file that transfer processes map, on a GPU
       one tensor
    3. `close()`

How KV lies in that memory is described by `kv_transfer.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import torch

from engine.config import EngineConfig
from engine.kv_cache.capacity import blocks_per_sequence, tokens_that_fit
from engine.kv_cache.groups import chain_sizes
from host.memory import format_bytes
from host.memory_file import MemoryFile
from kv_transfer.group_sizes import INDEX_PLANE, NARROW_PLANE
from kv_transfer.layout import KVGroup, KVLayout
from kv_transfer.planes import PageShape, PlaneShape
from tandem_kernels.attention.index_pages import (
    CachesByGroup,
    GroupCache,
    IndexedKV,
    IndexedLatents,
    IndexPages,
    LayerCache,
    OpenRows,
)
from tandem_kernels.attention.kv_pages import KVPages, PagedKV
from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.attention.token_rows import NarrowRows


def describe_capacity(config: EngineConfig, num_blocks: int) -> str:
    """Returns what the cache of one rank holds, for the log."""
    layout = config.kv_layout
    block_size, num_bytes = layout.groups[0].block_size, num_blocks * layout.block_bytes
    step_tokens = config.scheduler.max_num_batched_tokens
    states = sum(group.is_state for group in layout.groups)
    besides = f" ({states} a request for its states)" if states else ""
    scales = config.cache.kv_scales
    kept_as = "" if scales is None else f" in FP8 (e4m3), scales {scales.source}"
    every = lcm(*chain_sizes(layout.groups))
    ends = f"; prefixes are found every {every} tokens" if every > block_size else ""
    return (
        f"{num_blocks} blocks of {block_size} tokens{kept_as}{besides}, {format_bytes(num_bytes)}: "
        f"{tokens_that_fit(layout.groups, num_blocks, step_tokens)} tokens, or "
        f"{num_blocks / blocks_per_sequence(config):.1f} requests of {config.model.max_model_len}"
        + (ends if config.cache.enable_prefix_caching else "")
    )


def layer_views(memory: torch.Tensor, layout: KVLayout) -> list[LayerCache]:
    """Returns the cache of every layer of the model, as views of `memory`, the bytes of all slots.

    `[num_blocks, planes, heads, block_size, numbers of a row]` where the planes of the group are
    alike, else a view of keys and one of values, or of latents and of index keys; `[num_blocks,
    bytes of a page]` of uint8 where it holds states, whose planes differ in dtype; all of these
    where a layer is in several groups. All ranks have the same shapes.
    """
    num_blocks = memory.numel() // layout.block_bytes
    slots = memory.view(layout.num_slots, num_blocks, layout.page_bytes)
    views: dict[int, list[GroupCache]] = {}
    for index, group in enumerate(layout.groups):
        places = layout.places(index)
        for number, layer in enumerate(group.layers):
            slot, start = places.place_of(number)
            found = _view_of(slots[slot, :, start:], layout.page(index, rank=0), group)
            views.setdefault(layer, []).append(found)
    return [
        found[0] if len(found) == 1 else CachesByGroup(tuple(found))
        for _, found in sorted(views.items())
    ]


def _view_of(pages: torch.Tensor, page: PageShape, group: KVGroup) -> GroupCache:
    """Returns what pages [num_blocks, bytes of a page] hold of one layer of the group."""
    first, *others = page.planes
    if group.is_state:
        return pages[:, : page.num_bytes]
    if group.is_open:
        dtype = getattr(torch, group.dtype)
        return OpenRows(tuple(_rows(pages, plane, dtype) for plane in page.planes))
    if group.planes[0].name == NARROW_PLANE:
        return _narrow(pages, page, group)
    if any(plane.name == INDEX_PLANE for plane in group.planes):
        return _indexed(pages, page, group)
    alike = all((o.heads, o.row_bytes) == (first.heads, first.row_bytes) for o in others)
    return _pages(pages, page.planes, group, alike=alike)


def _rows(pages: torch.Tensor, plane: PlaneShape, dtype: torch.dtype) -> torch.Tensor:
    """Returns a plane of one head, [num_blocks, block_size, numbers of a row]."""
    own = pages[:, plane.offset : plane.offset + plane.num_bytes]
    return own.view(dtype).view(len(pages), plane.block_size, -1)


def _narrow(pages: torch.Tensor, page: PageShape, group: KVGroup) -> NarrowRows | IndexedLatents:
    """Returns vectors whose numbers are partly in e4m3, and index keys where there are any."""
    kinds = E4M3, getattr(torch, group.dtype), torch.uint8
    own = zip(page.planes, kinds, strict=False)
    rows = NarrowRows(*(_rows(pages, plane, kind) for plane, kind in own))
    index = page.planes[len(kinds) :]
    return IndexedLatents(rows, _index_of(pages, index)) if index else rows


def _index_of(pages: torch.Tensor, planes: Sequence[PlaneShape]) -> IndexPages:
    """Returns index keys, which are in float32 where they have no scales."""
    keys, *scales = planes
    if not scales:
        return IndexPages(_rows(pages, keys, torch.float32))
    scale = _rows(pages, scales[0], torch.float32)[:, :, 0]
    return IndexPages(_rows(pages, keys, E4M3), scale)


def _pages(
    pages: torch.Tensor, planes: Sequence[PlaneShape], group: KVGroup, *, alike: bool
) -> PagedKV:
    """Returns what the first planes of pages [num_blocks, bytes of a page] hold of one layer, in a
    tensor where they are `alike`."""
    first, end = planes[0], planes[-1].offset + planes[-1].num_bytes
    row = first.heads.count, group.rows_per_block, -1
    numbers = pages[:, :end].view(getattr(torch, group.dtype))
    if alike:
        return numbers.view(len(numbers), len(planes), *row)
    border = first.num_bytes // numbers.itemsize
    shape = len(numbers), *row
    return KVPages(numbers[:, :border].view(shape), numbers[:, border:].view(shape))


def _indexed(pages: torch.Tensor, page: PageShape, group: KVGroup) -> IndexedLatents | IndexedKV:
    """Returns latents, or keys and values, and index keys in pages [num_blocks, bytes of a
    page]."""
    place = next(i for i, plane in enumerate(group.planes) if plane.name == INDEX_PLANE)
    if place > 1:
        alike = group.planes[0].row_bytes == group.planes[1].row_bytes
        kv = _pages(pages, page.planes[:place], group, alike=alike)
        return IndexedKV(kv, _rows(pages, page.planes[place], torch.uint8))
    latents = _rows(pages, page.planes[0], getattr(torch, group.dtype))
    return IndexedLatents(latents, _index_of(pages, page.planes[place:]))


class KVCache:
    """`memory` has the bytes of all slots; `layers[i]`, the cache of layer i, and `pages`
    [slots, num_blocks, page bytes] are views of it. Zeroed at first: what was never written is
    never NaN."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, name: str = "kv-cache"
    ) -> None:
        num_bytes = num_blocks * layout.block_bytes
        self.num_blocks = num_blocks
        self._file: MemoryFile | None = None
        if device.type == "cpu":
            self._file = MemoryFile.create(name, num_bytes)
            self.memory = torch.frombuffer(self._file.buffer, dtype=torch.uint8)
        else:
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.layers = layer_views(self.memory, layout)
        self.pages = self.memory.view(layout.num_slots, num_blocks, layout.page_bytes)

    def close(self) -> None:
        """Closes the cache; its memory goes when nothing maps it any more. Idempotent."""
        self.layers.clear()
        self.memory = self.pages = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.close()
