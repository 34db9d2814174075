"""The store tier in one transfer process: our share of each block under a key in Mooncake Store,
which all nodes of one model share and which outlives them.

    key       tandem/<identity>/<the block's hash>
    value     `block_header`, then a page for each of our layers

1. `BlockStore`   takes an address; nothing is connected
2. `connect`      a child process tries it first: while a master does not answer, the library's
                  setup holds the interpreter's lock (0.3.13), which would stop this process
3. `find`, `read`, `write`   raise `StoreAway` without a connection. The library connects again by
                  itself when its master is back
4. `close`

A value is written once: a second put of the same key has the same bytes, and moves none. What
the store evicts, and what the death of one of its processes takes along, is a miss. A block counts
only if the header and all checksums are right.

Everything here blocks, for half a minute where a process of the store is frozen; reads and writes
may be called from a thread each.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.block_header import BlockHeaders
from kv_transfer.memory.slot_memory import SlotMemory
from kv_transfer.memory.store_address import StoreAddress
from kv_transfer.memory.store_environment import set_defaults

MOST_AT_ONCE = 16
"""Blocks in one call."""
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
    """Keeps what the slots of `memory` hold, for blocks of this identity (32 bytes). `host` is
    where the store's processes reach this one."""

    def __init__(
        self, address: StoreAddress, host: str, identity: bytes, memory: SlotMemory
    ) -> None:
        self._address = address
        self._host = host
        self._prefix = f"tandem/{identity.hex()[:32]}"
        self._memory = memory
        self._headers = BlockHeaders(identity, memory)
        shape = 2, MOST_AT_ONCE, self._headers.num_bytes
        self._texts = np.zeros(shape, np.uint8)
        """Headers that are read, and those that are written: at most one call of each at a time."""
        self._client: Any = None
        self._replicas: Any = None
        self.num_damaged = 0
        """Blocks that were not what they should be, since the start."""

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    def connect(self) -> None:
        """Raises `StoreAway`, `StoreMissing`."""
        address = self._address
        if self._client is not None:
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

        client = MooncakeDistributedStore()
        host, metadata, *rest = given
        if client.setup(host, metadata, 0, 0, *rest) != 0:
            raise StoreAway(f"{address.master} cannot be reached")
        for array in (self._memory.data, self._texts):
            if array.size and client.register_buffer(array.ctypes.data, array.nbytes) != 0:
                client.close()
                raise StoreMissing("Mooncake cannot register the host tier's memory")
        self._replicas = ReplicateConfig()
        self._replicas.replica_num = address.replicas
        self._client = client

    def find(self, names: Sequence[bytes]) -> int:
        """Returns how many blocks, from the first on, are there without a gap."""
        count = 0
        for part in _parts(names):
            found = self._connected().batch_is_exist([self._key(name) for name in part])
            for is_there in found:
                if is_there < 0:
                    raise StoreAway(f"{self._address.master} answers {is_there}")
                if not is_there:
                    return count
                count += 1
        return count

    def read(self, names: Sequence[bytes], slots: Sequence[int]) -> list[int]:
        """Reads blocks into slots, whose records then say so. Returns the slots of those that are
        missing or not what they should be."""
        failed, memory, texts = list[int](), self._memory, self._texts[0]
        for part in _parts(list(zip(names, slots, strict=True))):
            for _, slot in part:
                memory.clear(slot)
            results = self._connected().batch_get_into_multi_buffers(
                [self._key(name) for name, _ in part], *self._places([s for _, s in part], texts)
            )
            for text, (name, slot), result in zip(texts, part, results, strict=False):
                if result < 0:
                    failed.append(slot)
                    continue
                found = self._headers.read(text.tobytes())
                sums = memory.checksums(slot)
                if found != (name, sums):
                    self.num_damaged += 1
                    self._connected().remove(self._key(name), True)
                    failed.append(slot)
                    continue
                memory.put(slot, name, sums)
        return failed

    def write(self, slots: Sequence[int]) -> list[int]:
        """Writes what slots hold. Returns those of which the store has nothing."""
        failed, memory, texts = list[int](), self._memory, self._texts[1]
        named = [(slot, memory.name_of(slot)) for slot in slots]
        failed += [slot for slot, name in named if name is None]
        for part in _parts([(slot, name) for slot, name in named if name is not None]):
            for text, (slot, name) in zip(texts, part, strict=False):
                header = self._headers.make(name, memory.known_checksums(slot))
                text[:] = np.frombuffer(header, np.uint8)
            results = self._connected().batch_put_from_multi_buffers(
                [self._key(name) for _, name in part],
                *self._places([slot for slot, _ in part], texts),
                self._replicas,
            )
            failed += [s for (s, _), result in zip(part, results, strict=True) if result != 0]
        return failed

    def close(self) -> None:
        """Lets the connection go; not while a call is under way."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> Any:
        if self._client is None:
            raise StoreAway(f"{self._address.master} was not reached yet")
        return self._client

    def _key(self, name: bytes) -> str:
        return f"{self._prefix}/{name.hex()}"

    def _places(
        self, slots: Sequence[int], texts: npt.NDArray[np.uint8]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Returns where the headers and pages of these slots are, and how long they are."""
        memory = self._memory
        pages = [int(memory.slot(slot).ctypes.data) for slot in slots]
        heads = [int(texts[i].ctypes.data) for i in range(len(slots))]
        size = [self._headers.num_bytes, memory.slot_bytes]
        return [[h, p] for h, p in zip(heads, pages, strict=True)], [size] * len(slots)


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), MOST_AT_ONCE):
        yield items[start : start + MOST_AT_ONCE]
