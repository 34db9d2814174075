"""A GPU as a place for KV, through the CUDA driver. For processes without torch.

1. `CudaDevice(uuid)`   finds the GPU that the worker computes on; its primary context is made
2. `open_cache`         maps the worker's KV cache by its IPC handle
3. `allocate`           memory of the device that is this process's own
4. `pin`                host memory that the copy engines use directly
5. `new_stream`         copies beside the worker's kernels, on copy engines
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.devices.copy_stream import CopyStream, Fence, Numbers
from kv_transfer.memory.devices.cuda_driver import CudaDriver, cuda_driver
from kv_transfer.memory.devices.device import DeviceError, Mapping, MemoryDevice

logger = logging.getLogger(__name__)


class CudaDevice(MemoryDevice):
    """Makes the device's context current in the calling thread; use it from that thread."""

    is_gpu = True
    copies_at_once = False

    def __init__(self, uuid: bytes) -> None:
        self._driver = cuda_driver()
        visible = self._driver.device_uuids()
        if uuid not in visible:
            raise DeviceError(
                f"GPU {uuid.hex()} is not among the {len(visible)} that this process may see; "
                f"start transfer processes with the same CUDA_VISIBLE_DEVICES as their worker"
            )
        self.number = visible.index(uuid)
        self._driver.use_device(self.number)
        logger.info("copies are issued %s", self._driver.copies.way)
        self.pci_address = self._driver.pci_address(self.number)

    def open_cache(self, handle: KVCacheHandle) -> Mapping:
        cuda = handle.cuda
        if cuda is None:
            raise DeviceError(f"the KV cache of rank {handle.rank} does not lie on a GPU")
        driver = self._driver
        start = driver.open_ipc(cuda.ipc_handle)
        return Mapping(start + cuda.offset, cuda.num_bytes, lambda: driver.close_ipc(start))

    def allocate(self, num_bytes: int) -> Mapping:
        driver = self._driver
        address = driver.allocate(num_bytes)
        return Mapping(address, num_bytes, lambda: driver.free(address))

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        if memory.nbytes:
            self._driver.register_host(memory.ctypes.data, memory.nbytes)

    def new_stream(self) -> CopyStream:
        return CudaCopyStream(self._driver)


class CudaCopyStream(CopyStream):
    """A stream of its own, which waits for no other. Events are used again."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._stream = driver.new_stream()
        self._is_closed = False
        self._idle_events: list[int] = []

    def copy(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, in_portions: bool = False
    ) -> None:
        portion = self.portion_bytes if in_portions else 0
        self._driver.copies.issue(targets, sources, sizes, self._stream, portion)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        row_bytes: int,
        num_rows: int,
    ) -> None:
        self._driver.copy_rows(
            target, target_pitch, source, source_pitch, row_bytes, num_rows, self._stream
        )

    def fence(self) -> Fence:
        event = self._idle_events.pop() if self._idle_events else self._driver.new_event()
        self._driver.record(event, self._stream)
        return CudaFence(self._driver, event, self._idle_events)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._driver.synchronize(self._stream)
            self._driver.destroy_stream(self._stream)
            for event in self._idle_events:
                self._driver.destroy_event(event)
            self._idle_events.clear()


class CudaFence(Fence):
    """An event; it goes back to `idle` once it was seen to have happened."""

    def __init__(self, driver: CudaDriver, event: int, idle: list[int]) -> None:
        self._driver = driver
        self._event = event
        self._idle = idle
        self._is_done = False

    def is_done(self) -> bool:
        if not self._is_done and self._driver.has_happened(self._event):
            self._retire()
        return self._is_done

    def wait(self) -> None:
        if not self._is_done:
            self._driver.wait_for(self._event)
            self._retire()

    def _retire(self) -> None:
        self._is_done = True
        self._idle.append(self._event)
