"""Which device a process needs that maps a worker's KV cache."""

from __future__ import annotations

from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.devices.device import MemoryDevice


def device_of(handle: KVCacheHandle) -> MemoryDevice:
    """Raises `DeviceError` when this host has no such device."""
    if handle.cuda is None:
        from kv_transfer.memory.devices.host_device import HostDevice

        return HostDevice()
    from kv_transfer.memory.devices.cuda_device import CudaDevice

    return CudaDevice(handle.cuda.device_uuid)
