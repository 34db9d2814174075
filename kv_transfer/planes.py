"""A layer keeps planes of heads of each token; in a page they lie one after the other."""

from __future__ import annotations

import msgspec


class HeadRange(msgspec.Struct, frozen=True):
    """Global heads [start, start + count)."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


NO_HEADS = HeadRange(0, 0)


def heads_of_rank(num_heads: int, rank: int, tp_size: int) -> HeadRange:
    """Returns the heads that `rank` stores. With more ranks than heads, neighbours share one."""
    if tp_size <= num_heads:
        count = num_heads // tp_size
        return HeadRange(rank * count, count)
    return HeadRange(rank * num_heads // tp_size, 1)


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """One kind of number that a layer keeps of every token: keys, values, a latent vector, scales.

    Attributes:
        heads: Over all ranks.
        row_bytes: Of one token of one head.
        replicated: Every rank stores all heads.
    """

    name: str
    heads: int
    row_bytes: int
    replicated: bool = False

    def heads_of_rank(self, rank: int, tp_size: int) -> HeadRange:
        """Returns the heads that `rank` of `tp_size` stores."""
        if self.replicated:
            return HeadRange(0, self.heads)
        return heads_of_rank(self.heads, rank, tp_size)

    def can_be_split(self, tp_size: int) -> bool:
        """Returns whether ranks can share the heads evenly, or heads the ranks."""
        return self.replicated or self.heads % tp_size == 0 or tp_size % self.heads == 0

    def sources(self, rank: int, tp_size: int, peer_tp_size: int) -> list[tuple[int, HeadRange]]:
        """Returns [(rank of the peer, heads to pull there)]; every head of ours appears once.

        Where several ranks of the peer hold the same head, because there are more ranks than
        heads, the lowest is asked. A replicated plane comes from one rank.
        """
        wanted = self.heads_of_rank(rank, tp_size)
        if self.replicated:
            return [(rank * peer_tp_size // tp_size, wanted)]
        found: list[tuple[int, HeadRange]] = []
        covered = wanted.start
        for peer_rank in range(peer_tp_size):
            held = self.heads_of_rank(peer_rank, peer_tp_size)
            if held.start <= covered < held.stop:
                stop = min(held.stop, wanted.stop)
                found.append((peer_rank, HeadRange(covered, stop - covered)))
                covered = stop
                if covered == wanted.stop:
                    break
        return found


class PlaneShape(msgspec.Struct, frozen=True):
    """A plane in one page: `[heads.count, block_size, row_bytes]` from `offset` on. `block_size`
    counts rows."""

    heads: HeadRange
    row_bytes: int
    block_size: int
    offset: int

    @property
    def head_bytes(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def num_bytes(self) -> int:
        return self.heads.count * self.head_bytes

    def offset_of(self, head: int) -> int:
        """Returns where a global head begins in the page."""
        return self.offset + (head - self.heads.start) * self.head_bytes


class PageShape(msgspec.Struct, frozen=True):
    """One page, or one block of a message, holds this: planes one after the other."""

    block_size: int
    planes: tuple[PlaneShape, ...]

    @property
    def num_bytes(self) -> int:
        """Counts bytes without what a page leaves unused."""
        return sum(plane.num_bytes for plane in self.planes)

    @property
    def heads(self) -> tuple[HeadRange, ...]:
        """Returns heads by plane."""
        return tuple(plane.heads for plane in self.planes)
