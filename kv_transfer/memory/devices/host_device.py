"""Host memory as a place for KV: caches are memory files, the processor copies."""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char

import numpy as np
import numpy.typing as npt

from host.memory_file import MemoryFile
from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.devices.copy_stream import CopyStream, HostCopyStream
from kv_transfer.memory.devices.device import DeviceError, Mapping, MemoryDevice


class HostDevice(MemoryDevice):
    """Caches are memory files."""

    is_gpu = False
    copies_at_once = True

    def open_cache(self, handle: KVCacheHandle) -> Mapping:
        memory = MemoryFile.attach(handle.pid, handle.fd)
        return Mapping(memory.address, memory.size, memory.close)

    def allocate(self, num_bytes: int) -> Mapping:
        try:
            memory = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise DeviceError(f"there is no room for {num_bytes} bytes: {error}") from error
        address = addressof(c_char.from_buffer(memory))
        return Mapping(address, num_bytes, memory.close)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        return

    def new_stream(self) -> CopyStream:
        return HostCopyStream()
