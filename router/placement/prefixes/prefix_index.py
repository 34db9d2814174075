"""Remembers what each prefill node has probably cached.

    block hash ──▶ nodes that have it, one bit each
    node       ──▶ its blocks, least recently used first, as many as its cache holds

Two sources: the prompts that we sent there, block by block, and what the nodes report of the
prompts that other routers sent: the last block of each. A node that has a prompt's last block has
all before it; a conversation's next turn has that block in its chain, whichever router it comes to.

Soft: a node may have evicted a block, or have others that another router sent. A wrong guess costs
time, never correctness. A block may be on any number of nodes; were it capped, a popular opening
would fall out of the index and with it every longer match behind it.

1. learn    a prompt was sent to a node: its blocks become that node's most recent
   note     a node says that it has a prompt that ends with this block
2. match    which nodes have how much of a prompt
3. forget   a node is gone or was restarted: no match has it from then on
4. sweep    what it had goes, a few blocks with each prompt that is learnt: there may be millions,
            and all streams of a router wait while it works; so does what is more than fits
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from router.nodes.node import Node

_MAX_ENDS = 1000
"""Most ends remembered of each node: more prompts than a cache of some millions of tokens holds."""
_SWEPT = 256
"""Entries that are dropped at once, besides as many as are new: takes 0.1 to 0.3 ms."""
_NUM_PARTS = 256


class _Table:
    """Maps blocks to bits of nodes. It is kept in parts: a dict that grows moves all that it has,
    which takes 0.1 s with a million blocks."""

    def __init__(self) -> None:
        self._parts: tuple[dict[int, int], ...] = tuple({} for _ in range(_NUM_PARTS))

    def get(self, block: int) -> int:
        """Returns 0 for a block that it does not have."""
        return self._parts[block % _NUM_PARTS].get(block, 0)

    def add(self, block: int, bit: int) -> None:
        part = self._parts[block % _NUM_PARTS]
        part[block] = part.get(block, 0) | bit

    def put(self, block: int, bits: int) -> None:
        self._parts[block % _NUM_PARTS][block] = bits

    def clear(self, block: int, bit: int) -> bool:
        """Returns whether other bits are left; without, the block is gone."""
        part = self._parts[block % _NUM_PARTS]
        left = part[block] & ~bit
        if left:
            part[block] = left
        else:
            del part[block]
        return bool(left)

    def drop(self, block: int) -> None:
        del self._parts[block % _NUM_PARTS][block]


@dataclass(slots=True)
class _Shelf:
    """Holds one node's blocks; `bit` stands for the node in the index. `capacity`: blocks that its
    cache has room for, as far as is known."""

    bit: int
    capacity: int = 0
    ends: OrderedDict[int, None] = field(default_factory=OrderedDict)
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Holds `levels` of (blocks, nodes whose match ends there), shortest first; nodes as bits.
    `latest`: of reported matches, by their blocks, the node that reported last."""

    levels: tuple[tuple[int, int], ...]
    latest: dict[int, int]
    _shelves: dict[Node, _Shelf]
    _by_bit: dict[int, Node]

    def num_blocks(self, node: Node) -> int:
        """Returns how many leading blocks `node` has."""
        if not self.levels or (shelf := self._shelves.get(node)) is None:
            return 0
        for count, bits in reversed(self.levels):
            if bits & shelf.bit:
                return count
        return 0

    def holders(self, count: int) -> Iterator[tuple[Node, int]]:
        """Yields nodes and how many leading blocks they have, the longest matches first: those of
        at least `count` blocks. Of equal ones comes first who reported it last: a conversation that
        moves is longest there."""
        for length, bits in reversed(self.levels):
            if length < count:
                return
            latest = bits & self.latest.get(length, 0)
            for part in (latest, bits ^ latest):
                while part:
                    lowest = part & -part
                    yield self._by_bit[lowest], length
                    part ^= lowest

    def best(self, count: int, rng: random.Random) -> list[Node]:
        """Returns at most `count` nodes of the longest match; none when there is no match. Which of
        many is left to chance: an opening that all share is on every node."""
        found: list[Node] = []
        bits = self.levels[-1][1] if self.levels else 0
        start = 1 << rng.randrange(bits.bit_length() or 1)
        for part in (bits & -start, bits & (start - 1)):
            while part and len(found) < count:
                lowest = part & -part
                found.append(self._by_bit[lowest])
                part ^= lowest
        return found


class PrefixIndex:
    """Holds `max_entries` pairs of block and node at most, about 200 bytes each."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._nodes_of = _Table()
        self._ends = _Table()
        self._latest = _Table()  # [end]: bit of the node that reported it last
        self._shelves: OrderedDict[Node, _Shelf] = OrderedDict()
        self._by_bit: dict[int, Node] = {}
        self._free_bits: list[int] = []
        self._gone: list[_Shelf] = []
        """Holds shelves of nodes that are gone, which are being swept."""
        self._gone_bits = 0
        self.num_entries = 0

    def match(self, blocks: Sequence[int]) -> PrefixMatch:
        levels: list[tuple[int, int]] = []
        alive = self._nodes_of.get(blocks[0]) & ~self._gone_bits if blocks else 0
        depth = 0
        while alive:
            depth += 1
            more = alive & self._nodes_of.get(blocks[depth]) if depth < len(blocks) else 0
            if more != alive:
                levels.append((depth, alive & ~more))
            alive = more
        reported = list(self._reported(blocks, depth))
        latest = {length: self._latest.get(blocks[length - 1]) for length, _ in reported}
        return PrefixMatch((*levels, *reported), latest, self._shelves, self._by_bit)

    def _reported(self, blocks: Sequence[int], start: int) -> Iterator[tuple[int, int]]:
        """Yields matches longer than `start`."""
        for index in range(start, len(blocks)):
            if bits := self._ends.get(blocks[index]) & ~self._gone_bits:
                yield index + 1, bits

    def note(self, node: Node, ends: Iterable[int]) -> None:
        """Records that `node` has the prompts that end with these blocks."""
        shelf = self._shelves.get(node) or self._new_shelf(node)
        for end in ends:
            shelf.ends[end] = None
            shelf.ends.move_to_end(end)
            self._ends.add(end, shelf.bit)
            self._latest.put(end, shelf.bit)
        while len(shelf.ends) > _MAX_ENDS:
            self._drop_end(shelf)
        self._sweep(_SWEPT)

    def learn(self, node: Node, blocks: Sequence[int], capacity: int) -> None:
        """Records that `node` will have `blocks`, and `capacity` in all. Of a chain the end is
        evicted first: without the blocks before it, it is of no use."""
        shelf = self._shelves.get(node) or self._new_shelf(node)
        for block in reversed(blocks):
            if block in shelf.blocks:
                shelf.blocks.move_to_end(block)
            else:
                shelf.blocks[block] = None
                self._nodes_of.add(block, shelf.bit)
                self.num_entries += 1
        shelf.capacity = capacity
        most = _SWEPT + len(blocks)
        for _ in range(min(most, len(shelf.blocks) - capacity)):
            self._drop_oldest(shelf)
        self._sweep(most)
        if not self._gone:
            for _ in range(min(most, self.num_entries - self.max_entries)):
                self._drop_oldest(self._next_shelf())

    def has_room(self, node: Node, num_blocks: int) -> bool:
        """Returns whether `node` could take this many more blocks without dropping any."""
        shelf = self._shelves.get(node)
        return shelf is None or len(shelf.blocks) + num_blocks <= shelf.capacity

    def retain(self, nodes: Collection[Node]) -> None:
        """Forgets all nodes but these."""
        for node in [node for node in self._shelves if node not in nodes]:
            shelf = self._shelves.pop(node)
            self._gone.append(shelf)
            self._gone_bits |= shelf.bit
            del self._by_bit[shelf.bit]

    def _sweep(self, most: int) -> None:
        """Drops this many entries of nodes that are gone, whose bits are free once all are."""
        while self._gone and most > 0:
            shelf = self._gone[-1]
            most -= 1
            if shelf.blocks:
                self._drop_oldest(shelf)
            elif shelf.ends:
                self._drop_end(shelf)
            else:
                self._gone.pop()
                self._gone_bits ^= shelf.bit
                self._free_bits.append(shelf.bit)

    def _new_shelf(self, node: Node) -> _Shelf:
        if not self._free_bits:
            self._free_bits.append(1 << (len(self._by_bit) + len(self._gone)))
        bit = self._free_bits.pop()
        self._by_bit[bit] = node
        shelf = self._shelves[node] = _Shelf(bit)
        return shelf

    def _next_shelf(self) -> _Shelf:
        """Returns the next that gives up a block: one after the other, so that none is starved."""
        while True:
            node, shelf = next(iter(self._shelves.items()))
            self._shelves.move_to_end(node)
            if shelf.blocks:
                return shelf

    def _drop_oldest(self, shelf: _Shelf) -> None:
        block, _ = shelf.blocks.popitem(last=False)
        self._nodes_of.clear(block, shelf.bit)
        self.num_entries -= 1

    def _drop_end(self, shelf: _Shelf) -> None:
        end, _ = shelf.ends.popitem(last=False)
        if not self._ends.clear(end, shelf.bit):
            self._latest.drop(end)
