"""Marks on pages that a worker and its transfer processes share, and that a device may know.

1. `create` in the worker; a number of its cache handle leads to them
2. `attach` in another process
3. `DevicePage` in the worker, where the device's stream writes them or waits for them
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import ClassVar, Self

from host.memory_file import MemoryFile
from kv_transfer.memory.devices.device import DeviceError

MARK_BYTES = 4
"""A device writes and reads no more at once."""


class MarksPage:
    """Marks of 32 bits, `rows` of them for each layer."""

    name: ClassVar[str]
    rows: ClassVar[int] = 1

    def __init__(self, memory: MemoryFile, num_layers: int) -> None:
        self._memory = memory
        self.num_layers = num_layers

    @classmethod
    def create(cls, num_layers: int) -> Self:
        """Creates marks on pages of its own, because devices know memory by pages."""
        num_pages = -(-cls.rows * num_layers * MARK_BYTES // mmap.PAGESIZE)
        return cls(MemoryFile.create(cls.name, num_pages * mmap.PAGESIZE), num_layers)

    @classmethod
    def attach(cls, pid: int, fd: int, num_layers: int) -> Self:
        """Raises OSError when the owner has gone."""
        return cls(MemoryFile.attach(pid, fd), num_layers)

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def num_bytes(self) -> int:
        return self._memory.size

    def close(self) -> None:
        self._memory.close()


class DevicePage:
    """Marks as the device sees them; `address` is theirs there."""

    def __init__(self, marks: MarksPage) -> None:
        """Raises `DeviceError`. The device's context must be current."""
        from kv_transfer.memory.devices.cuda_driver import cuda_driver

        self.driver = cuda_driver()
        self._host_address = marks.address
        self.driver.register_host(self._host_address, marks.num_bytes)
        self.address = self.driver.device_address(self._host_address)

    def close(self) -> None:
        """Waits for the device. One that has failed holds nothing any more."""
        with suppress(DeviceError):
            self.driver.synchronize_context()
            self.driver.unregister_host(self._host_address)
