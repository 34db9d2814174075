"""Memory of a transfer process that moves KV through NIXL, and whose each slot of it is.

A window lies on the device of the cache, beside it. UCX's CUDA IPC shares only memory that its own
process has allocated, and a cache is its worker's. And a read that has begun cannot be taken back:
in a window it holds up its slot, in the cache it would hold up blocks that others need.

    1. `open_window`   memory is allocated and registered, once
    2. `take`          a slot is another's; None: it has to wait, and is woken when it is its turn
    3. `give_back`     the slot is none's; the first in line is woken, and nothing overtakes it
       `leave`         something waits no more
    4. `close`         nothing reads or writes the window any more
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kv_transfer.config import KVTransferConfig
from kv_transfer.memory.devices.device import MemoryDevice
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError

_FEWEST_SLOTS = 4
"""While one is read, others are filled, emptied, or wait for the word that they were read."""
_SLOT_BYTES = 16 << 20
"""Larger ones would be read as quickly, but what they bring would be copied out later."""
_ALIGNMENT = 4096

logger = logging.getLogger(__name__)


class FairSlots:
    """Slots, each of one owner at most, given in the order of requests."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._waiting: dict[object, Callable[[], None]] = {}
        """Wakes the waiters, the longest first."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_awaited_beside(self, who: object) -> bool:
        """Returns whether others than `who` wait."""
        return any(other is not who for other in self._waiting)

    def take(self, who: object, wake: Callable[[], None]) -> int | None:
        """Returns a slot. None: none is free, or others have waited longer; `wake` is called when
        `who` should ask again."""
        first = next(iter(self._waiting), who)
        if not self._free or first is not who:
            self._waiting[who] = wake
            return None
        self._waiting.pop(who, None)
        slot = self._free.pop()
        self._wake_first()
        return slot

    def leave(self, who: object) -> None:
        """It asks no more. Idempotent."""
        if self._waiting.pop(who, None) is not None:
            self._wake_first()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._wake_first()

    def _wake_first(self) -> None:
        if self._free and self._waiting:
            next(iter(self._waiting.values()))()


class Window:
    """Slots of memory of `device` that `agent` has registered."""

    def __init__(
        self, agent: NixlAgent, device: MemoryDevice, num_slots: int, slot_bytes: int
    ) -> None:
        """Raises `NixlError` or `DeviceError`."""
        self.agent = agent
        self.device = device.number
        self.slots = FairSlots(num_slots)
        self.slot_bytes = slot_bytes
        self._memory = device.allocate(num_slots * slot_bytes)
        self.address = self._memory.address
        try:
            self._registered = agent.register(self.address, self._memory.num_bytes, self.device)
        except NixlError:
            self._memory.close()
            raise

    def address_of(self, slot: int) -> int:
        """Returns where a slot begins."""
        return self.address + slot * self.slot_bytes

    def close(self) -> None:
        """Frees the memory, unless NIXL says that it is used."""
        try:
            self.agent.deregister(self._registered)
        except NixlError as error:
            logger.info("the window is left to the end of the process: %s", error)
        else:
            self._memory.close()


def open_window(config: KVTransferConfig, device: MemoryDevice, longest_chunk: int) -> Window:
    """Returns the window of one direction of one transfer process, whose slots hold a chunk of
    `longest_chunk` bytes and more, and logs how long it took. Raises `NixlError` or
    `DeviceError`."""
    num_bytes = config.process_window_bytes
    slot_bytes = min(num_bytes // _FEWEST_SLOTS // _ALIGNMENT * _ALIGNMENT, _SLOT_BYTES)
    slot_bytes = max(slot_bytes, longest_chunk)
    num_slots = num_bytes // slot_bytes
    if num_slots == 0:
        raise NixlError(
            f"a chunk of {longest_chunk} bytes does not fit into a window of {num_bytes}; raise "
            f"--kv-nixl-window-bytes, or lower --kv-chunk-bytes or --kv-processes"
        )
    at = time.monotonic()
    agent = NixlAgent(config.hosts)
    started = time.monotonic()
    window = Window(agent, device, num_slots, slot_bytes)
    logger.info(
        "NIXL started in %.1f s, with a window of %d times %.1f MB of %s in %.1f s",
        started - at,
        num_slots,
        slot_bytes / 1e6,
        "host memory" if device.number is None else f"GPU {device.number}",
        time.monotonic() - started,
    )
    return window
