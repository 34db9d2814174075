"""The store tier in one transfer process: our share of each block in Mooncake Store, which all
nodes of one model share and which outlives them. A share is one value or several (`store_parts`).

    key       tandem/<identity of the part>/<the block's hash>
    value     `block_header`, then a page for each of the part's layers

1. `BlockStore`   takes an address; nothing is connected
2. `connect`      a child process tries it first: while a master does not answer, the library's
                  setup holds the interpreter's lock (0.3.13), which would stop this process
3. `find`, `get`, `write`   raise `StoreAway` without a connection. The library connects again by
                  itself when its master is back
   `check`        compares what `get` has brought, and says so in the slots' records
4. `close`

One connection receives with one thread of the library, so there are several, each for one `get` at
a time. What a `get` has brought has an area for headers, which is given back by `check`, or when
nothing refers to it any more: a reader may be cancelled in between.

A value is written once: a second put of the same key has the same bytes, and moves none. What
the store evicts, and what the death of one of its processes takes along, is a miss. A block counts
only if the header and all checksums are right.

Everything here blocks, for half a minute where a process of the store is frozen. `write` may be
called from one thread, `find`, `get` and `check` from several.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.pool.slot_memory import SlotMemory
from kv_transfer.memory.pool.store_address import StoreAddress
from kv_transfer.memory.pool.store_environment import set_defaults
from kv_transfer.memory.pool.store_parts import StorePart

_MOST_AT_ONCE = 16
"""Blocks in one call; `get` takes fewer, since what it has brought is checked meanwhile."""
_MOST_IN_GET = 8
_AREAS = 3
"""Calls of `get` by connection whose headers are kept: those of one, and of what is checked."""
_CONNECT_TIMEOUT_S = 20.0
"""Half of it is the import of the library on a busy host."""
_TRY = """
import sys
from mooncake.store import MooncakeDistributedStore
host, metadata, protocol, devices, master = sys.argv[1:]
store = MooncakeDistributedStore()
sys.exit(0 if store.setup(host, metadata, 0, 0, protocol, devices, master) == 0 else 3)
"""


class StoreAway(KVTransferError):
    """The store cannot be reached."""


class StoreMissing(KVTransferError):
    """The library cannot be loaded."""


class BlockStore:
    """Keeps what the slots of `memory` hold, in these parts. `host` is where the store's processes
    reach this one."""

    def __init__(
        self, address: StoreAddress, host: str, parts: Sequence[StorePart], memory: SlotMemory
    ) -> None:
        self._address = address
        self._host = host
        self._parts = parts
        self._memory = memory
        longest = max(part.headers.num_bytes for part in parts)
        shape = 1 + _AREAS * address.connections, _MOST_AT_ONCE * len(parts), longest
        self._texts = np.zeros(shape, np.uint8)
        """Headers: those that are written, and those of each call that reads."""
        self._areas = SimpleQueue[int]()
        for area in range(1, shape[0]):
            self._areas.put(area)
        self._clients: list[Any] = []
        self._idle = SimpleQueue[Any]()
        """Clients that no `get` uses."""
        self._replicas: Any = None
        self.num_damaged = 0
        """Values that were not what they should be, since the start."""

    @property
    def is_connected(self) -> bool:
        return bool(self._clients)

    @property
    def num_connections(self) -> int:
        return self._address.connections

    def connect(self) -> None:
        """Raises `StoreAway`, `StoreMissing`."""
        address = self._address
        if self._clients:
            return
        given = (self._host, address.metadata, address.protocol, address.devices, address.master)
        try:
            tried = subprocess.run(
                [sys.executable, "-c", _TRY, *given],
                stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=_CONNECT_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise StoreAway(f"{address.master} does not answer") from None
        if tried.returncode == 1:
            last = (tried.stderr.strip().splitlines() or ["no reason"])[-1]
            raise StoreMissing(f"Mooncake cannot be used: {last}; install 'tandem[store]'")
        if tried.returncode != 0:
            raise StoreAway(f"{address.master} cannot be reached")
        set_defaults()
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        host, metadata, *rest = given
        clients = list[Any]()
        try:
            for _ in range(self.num_connections):
                clients.append(client := MooncakeDistributedStore())
                if client.setup(host, metadata, 0, 0, *rest) != 0:
                    raise StoreAway(f"{address.master} cannot be reached")
                for array in (self._memory.data, self._texts):
                    if array.size and client.register_buffer(array.ctypes.data, array.nbytes) != 0:
                        raise StoreMissing("Mooncake cannot register the host tier's memory")
        except KVTransferError:
            for client in clients:
                client.close()
            raise
        self._replicas = ReplicateConfig()
        self._replicas.replica_num = address.replicas
        for client in clients:
            self._idle.put(client)
        self._clients = clients

    def find(self, names: Sequence[bytes], *, is_chain: bool = True) -> list[int]:
        """Returns the places among `names` of blocks that are there; of a chain, up to the first
        gap."""
        found = list[int]()
        for first in range(0, len(names), _MOST_AT_ONCE):
            some = names[first : first + _MOST_AT_ONCE]
            keys = [part.key(name) for name in some for part in self._parts]
            exist = self._connected().batch_is_exist(keys)
            for place in range(len(some)):
                of_block = exist[place * len(self._parts) :][: len(self._parts)]
                if min(of_block) < 0:
                    raise StoreAway(f"{self._address.master} answers {min(of_block)}")
                if min(of_block):
                    found.append(first + place)
                elif is_chain:
                    return found
        return found

    def get(self, some: Sequence[tuple[bytes, int]]) -> Brought:
        """Reads blocks, by hash, into slots, of one of `pieces`. `check` must follow."""
        self._connected()
        for _, slot in some:
            self._memory.clear(slot)
        area, client = self._areas.get(), self._idle.get()
        try:
            values = self._values(some, self._texts[area])
            results = client.batch_get_into_multi_buffers(
                [one.key for one in values], *_places(values)
            )
            brought = Brought(some, values, results)
            brought.give_back = weakref.finalize(brought, self._areas.put, area)
            return brought
        except BaseException:
            self._areas.put(area)
            raise
        finally:
            self._idle.put(client)

    def check(self, brought: Brought) -> list[int]:
        """Compares checksums. Has the records of slots say which blocks are there, and returns the
        slots of those that are missing or not what they should be. Raises `StoreAway`."""
        try:
            return self._checked(brought)
        finally:
            brought.give_back()

    def _checked(self, brought: Brought) -> list[int]:
        memory = self._memory
        sums: dict[int, dict[int, int]] = {slot: {} for _, slot in brought.blocks}
        for one, result in zip(brought.values, brought.results, strict=True):
            if result < 0:
                continue
            found = {place: memory.checksum(one.slot, place) for place in one.part.places}
            if one.part.headers.read(one.text.tobytes()) == (one.name, list(found.values())):
                sums[one.slot] |= found
                continue
            self.num_damaged += 1
            self._connected().remove(one.key, True)
        failed = list[int]()
        for name, slot in brought.blocks:
            if len(sums[slot]) == memory.num_layers:
                memory.put(slot, name, [sums[slot][i] for i in range(memory.num_layers)])
            else:
                failed.append(slot)
        return failed

    def write(self, slots: Sequence[int]) -> list[int]:
        """Writes what slots hold. Returns those of which the store does not have all."""
        memory = self._memory
        named = [(memory.name_of(slot), slot) for slot in slots]
        failed = {slot for name, slot in named if name is None}
        whole = [(name, slot) for name, slot in named if name is not None]
        for some in _batches(whole):
            values = self._values(some, self._texts[0])
            for one in values:
                known = memory.known_checksums(one.slot)
                header = one.part.headers.make(one.name, [known[i] for i in one.part.places])
                one.text[:] = np.frombuffer(header, np.uint8)
            results = self._connected().batch_put_from_multi_buffers(
                [one.key for one in values], *_places(values), self._replicas
            )
            pairs = zip(values, results, strict=True)
            failed.update(one.slot for one, result in pairs if result != 0)
        return sorted(failed)

    def close(self) -> None:
        """Lets the connection go; not while a call is under way."""
        for client in self._clients:
            client.close()
        self._clients = []

    def _connected(self) -> Any:
        if not self._clients:
            raise StoreAway(f"{self._address.master} was not reached yet")
        return self._clients[0]

    def _values(
        self, some: Sequence[tuple[bytes, int]], texts: npt.NDArray[np.uint8]
    ) -> list[_Value]:
        """Returns the values of these blocks in these slots. `texts` get their headers."""
        memory, found = self._memory, list[_Value]()
        for name, slot in some:
            first = int(memory.slot(slot).ctypes.data)
            for part in self._parts:
                text = texts[len(found), : part.headers.num_bytes]
                pages = [first + place * memory.page_bytes for place in part.places]
                found.append(_Value(part, name, slot, text, pages, memory.page_bytes))
        return found


@dataclass(slots=True, weakref_slot=True, eq=False)
class Brought:
    """Holds what a call of `get` has read. `give_back` ends the use of the area of its headers."""

    blocks: Sequence[tuple[bytes, int]]
    values: Sequence[_Value]
    results: Sequence[int]
    give_back: Callable[[], object] = field(init=False)


@dataclass(frozen=True, slots=True)
class _Value:
    """One part of the block `name` in `slot`: its header is in `text`, its pages at `pages`."""

    part: StorePart
    name: bytes
    slot: int
    text: npt.NDArray[np.uint8]
    pages: list[int]
    page_bytes: int

    @property
    def key(self) -> str:
        return self.part.key(self.name)


def _places(values: Sequence[_Value]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns where headers and pages of values are, and how long they are."""
    where = [[int(one.text.ctypes.data), *one.pages] for one in values]
    sizes = [[one.text.nbytes, *[one.page_bytes] * len(one.pages)] for one in values]
    return where, sizes


def pieces(names: Sequence[bytes], slots: Sequence[int]) -> list[Sequence[tuple[bytes, int]]]:
    """Cuts blocks, and where they come, into what `get` takes."""
    return list(_batches(list(zip(names, slots, strict=True)), _MOST_IN_GET))


def _batches(items: Sequence[Any], size: int = _MOST_AT_ONCE) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
