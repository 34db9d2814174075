"""Which bytes of a page go where in a page of another shape.

Nodes with other tensor-parallel sizes hold other heads, so heads of a plane begin elsewhere in
their pages; with other block sizes every head is cut into other pieces. Planes that continue each
other on both sides are copied as one:

    source  | k: heads 0 1 2 3 | v: heads 0 1 2 3 |       wanted: heads 2 and 3
                       ^^^                 ^^^
    target                 | k: heads 2 3 | v: heads 2 3 |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.planes import PageShape


@dataclass(frozen=True, slots=True)
class Rows:
    """`num_rows` heads, each with one row for every token of a block, at equal distances."""

    target: int
    """The first head begins here in the target page; `source` likewise."""
    source: int
    target_pitch: int
    source_pitch: int
    row_bytes: int
    num_rows: int

    def goes_on_with(self, other: Rows) -> bool:
        """Returns whether the two are as one."""
        alike = (self.target_pitch, self.source_pitch, self.row_bytes) == (
            other.target_pitch,
            other.source_pitch,
            other.row_bytes,
        )
        return (
            alike
            and other.target == self.target + self.num_rows * self.target_pitch
            and other.source == self.source + self.num_rows * self.source_pitch
        )


class PageCopy:
    """Copies the heads that `share` names, as `KVLayout.share` has them, from pages that look like
    `source` to pages that look like `target`. Both must hold them."""

    def __init__(self, target: PageShape, source: PageShape, share: PageShape) -> None:
        self.rows = _rows(target, source, share)
        is_whole = target.block_size == source.block_size
        pieces = _pieces(self.rows) if is_whole else []
        self._pieces = np.array(pieces, np.int64).reshape(-1, 3)

    def of_blocks(self, targets: Numbers, sources: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Returns (targets, sources, sizes) of copies of whole blocks at these addresses. Blocks
        must have equally many tokens on both sides."""
        pieces = self._pieces
        return (
            np.add.outer(targets, pieces[:, 0]).ravel(),
            np.add.outer(sources, pieces[:, 1]).ravel(),
            np.tile(pieces[:, 2], len(targets)),
        )


@lru_cache(maxsize=64)
def page_copy(target: PageShape, source: PageShape, share: PageShape) -> PageCopy:
    """Returns the `PageCopy` of these shapes, which all streams of a transfer have in common."""
    return PageCopy(target, source, share)


def _rows(target: PageShape, source: PageShape, share: PageShape) -> list[Rows]:
    found: list[Rows] = []
    for ours, theirs, wanted in zip(target.planes, source.planes, share.planes, strict=True):
        if wanted.heads.count == 0:
            continue
        rows = Rows(
            target=ours.offset_of(wanted.heads.start),
            source=theirs.offset_of(wanted.heads.start),
            target_pitch=ours.head_bytes,
            source_pitch=theirs.head_bytes,
            row_bytes=ours.row_bytes,
            num_rows=wanted.heads.count,
        )
        if found and found[-1].goes_on_with(rows):
            found[-1] = replace(found[-1], num_rows=found[-1].num_rows + rows.num_rows)
        else:
            found.append(rows)
    return found


def _pieces(rows: list[Rows]) -> list[tuple[int, int, int]]:
    """Returns (target, source, bytes) where heads are equally long: then neighbours continue each
    other even if their rows differ."""
    pieces: list[tuple[int, int, int]] = []
    for part in rows:
        size = part.num_rows * part.target_pitch
        if pieces:
            target, source, before = pieces[-1]
            if (part.target, part.source) == (target + before, source + before):
                pieces[-1] = (target, source, before + size)
                continue
        pieces.append((part.target, part.source, size))
    return pieces
