"""A kind of memory that holds KV: what opens it, pins host memory for it, and copies.

1. `device_of(handle)` in a process that maps a worker's KV cache
2. `open_cache`, `pin`, `new_stream`
3. `close` ends with the process
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.base import KVCacheHandle
from kv_transfer.errors import KVTransferError
from kv_transfer.host.memory_file import MemoryFile
from kv_transfer.memory.copy_stream import CopyStream, HostCopyStream


class DeviceError(KVTransferError):
    """The device, or its driver, refused or failed. Says which call and why."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Another process's memory at an address of ours, until `close`."""

    address: int
    num_bytes: int
    close: Callable[[], None]


class MemoryDevice(ABC):
    """Where the cache of one rank lies."""

    is_gpu: bool
    copies_at_once: bool
    """A copy is done when it was issued, so its source need not live longer."""

    @abstractmethod
    def open_cache(self, handle: KVCacheHandle) -> Mapping:
        """Raises `DeviceError`, or OSError when the owner has gone."""

    @abstractmethod
    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """From now on copies from and to this host memory run beside us."""

    @abstractmethod
    def new_stream(self) -> CopyStream: ...


class HostDevice(MemoryDevice):
    """Caches are memory files."""

    is_gpu = False
    copies_at_once = True

    def open_cache(self, handle: KVCacheHandle) -> Mapping:
        memory = MemoryFile.attach(handle.pid, handle.fd)
        return Mapping(memory.address, memory.size, memory.close)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        return

    def new_stream(self) -> CopyStream:
        return HostCopyStream()


def device_of(handle: KVCacheHandle) -> MemoryDevice:
    """Raises `DeviceError` when this host has no such device."""
    if handle.cuda is None:
        return HostDevice()
    from kv_transfer.memory.cuda_device import CudaDevice

    return CudaDevice(handle.cuda.device_uuid)
