"""Turns the tensor that holds a KV cache into the handle by which another process maps it.

Host memory: the tensor knows its address; the kernel knows which file lies there
(/proc/self/maps) and under which descriptor we hold it (/proc/self/fd).

GPU memory: the driver knows the allocation that the address lies in, and exports it as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kv_transfer.base import CudaCacheHandle, KVCacheHandle
from kv_transfer.layout import KVLayout
from kv_transfer.memory.devices.device import DeviceError


def handle_of_tensor(rank: int, layout: KVLayout, memory: Any) -> KVCacheHandle:
    """Returns the handle of a rank's cache.

    `memory`: a tensor with all slots of the cache, at the start of its memory file.

    Raises:
        ValueError: It does not lie in a memory file of this process.
        DeviceError: The GPU's driver cannot share it.
    """
    address, num_bytes = memory.data_ptr(), memory.numel() * memory.element_size()
    num_blocks = num_bytes // layout.block_bytes
    if memory.is_cuda:
        cuda = _cuda_handle(address, num_bytes)
        return KVCacheHandle(rank=rank, pid=os.getpid(), num_blocks=num_blocks, cuda=cuda)
    inode = _inode_at(address)
    return KVCacheHandle(
        rank=rank, pid=os.getpid(), fd=_descriptor_of(inode), num_blocks=num_blocks
    )


def _cuda_handle(address: int, num_bytes: int) -> CudaCacheHandle:
    """The allocator may have put the tensors anywhere into a larger allocation."""
    from kv_transfer.memory.devices.cuda_driver import CudaError, cuda_driver

    driver = cuda_driver()
    start, allocated = driver.allocation_of(address)
    try:
        ipc_handle = driver.ipc_handle(start)
    except CudaError as error:
        raise DeviceError(
            f"the KV cache cannot be shared with transfer processes: {error}. Memory of torch's "
            f"expandable segments never can: unset PYTORCH_CUDA_ALLOC_CONF"
        ) from error
    offset = address - start
    if offset + num_bytes > allocated:
        raise DeviceError("the KV cache must lie in one allocation")
    return CudaCacheHandle(
        device_uuid=driver.current_uuid(),
        ipc_handle=ipc_handle,
        offset=offset,
        num_bytes=num_bytes,
    )


def _inode_at(address: int) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            if int(inode) == 0 or address - start + int(offset, 16) != 0:
                break
            return int(inode)
    raise ValueError(
        "the KV cache does not start a memory file; allocate it as one MemoryFile for all layers"
    )


def _descriptor_of(inode: int) -> int:
    for link in Path("/proc/self/fd").iterdir():
        try:
            found = link.stat()
        except FileNotFoundError:
            continue
        if found.st_ino == inode and str(link.readlink()).startswith("/memfd:"):
            return int(link.name)
    raise ValueError("the memory file of the KV cache is not open in this process any more")
