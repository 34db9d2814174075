"""Stands for NIXL between windows of one process: what is read is there at once."""

from __future__ import annotations

import asyncio

import numpy as np

from kv_transfer.memory.devices.copy_stream import HostCopyStream, Numbers
from kv_transfer.memory.devices.host_device import HostDevice
from kv_transfer.transports.in_place.read_leases import ReadLeases
from kv_transfer.transports.nixl.agent import NixlAgent, Transfer
from kv_transfer.transports.nixl.peers import Peer
from kv_transfer.transports.nixl.window import Window
from kv_transfer.transports.nixl.window_reads import PeerMemory, ReadQueue, WindowRead


class MemoryAgent(NixlAgent):
    """Copies between addresses, and hears itself of notices that it has `given`."""

    def __init__(self) -> None:
        self.given: list[bytes] = []

    def register(self, address: int, num_bytes: int, device: int | None) -> None:
        return

    def deregister(self, registered: object) -> None:
        return

    def notices(self) -> list[bytes]:
        given, self.given = self.given, []
        return given

    def read(
        self,
        name: str,
        targets: Numbers,
        sources: Numbers,
        sizes: Numbers,
        devices: tuple[int | None, int | None],
        notice: bytes = b"",
    ) -> Transfer:
        HostCopyStream().copy(targets, sources, sizes)
        if notice:
            self.given.append(notice)
        return Transfer(self, None, is_done=True)


def memory_window(num_slots: int, slot_bytes: int) -> Window:
    return Window(MemoryAgent(), HostDevice(), num_slots, slot_bytes)


def queue_into(window: Window) -> ReadQueue:
    def fail(error: BaseException) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "a read", "exception": error})

    return ReadQueue(window, fail)


def peer_of(window: Window, leases: ReadLeases) -> Peer:
    """Returns the holder of this window, as a reader knows it."""
    memory = PeerMemory(
        "peer", window.address, window.slots.num_slots, window.slot_bytes, None, leases.address
    )
    return Peer("p", memory, WindowRead(memory, (0, 0), word=0))


def write(window: Window, slot: int, data: bytes) -> None:
    """Puts bytes into a slot."""
    held = np.frombuffer(data, np.uint8)
    HostCopyStream().copy(
        np.array([window.address_of(slot)]), np.array([held.ctypes.data]), np.array([len(data)])
    )
