"""Shared memory without names.

A `MemoryFile` is an anonymous file of the kernel (`memfd_create`). Another process of the same
user maps it through `/proc/<pid>/fd/<fd>` while its creator lives. Nothing is ever left behind,
however a process dies, and the size of `/dev/shm` does not limit it.

    1. `create(name, size)` in the owner; `pid` and `fd` travel to the others in any message
    2. `attach(pid, fd)` in each of them
    3. `close()` everywhere; the memory goes with the last mapping
"""

from __future__ import annotations

import ctypes
import mmap
import os


class MemoryFile:
    """A mapping of `size` bytes, shared and zeroed at first. `buffer` is writable."""

    def __init__(self, fd: int, size: int, owner_pid: int, owner_fd: int) -> None:
        self._fd = fd
        self.size = size
        self.pid = owner_pid
        self.fd = owner_fd
        self.buffer = mmap.mmap(fd, size, mmap.MAP_SHARED)

    @classmethod
    def create(cls, name: str, size: int) -> MemoryFile:
        """`name` shows in /proc/<pid>/maps, no more. Pages are taken when first touched."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return cls(fd, size, os.getpid(), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, pid: int, fd: int) -> MemoryFile:
        """Raises FileNotFoundError or PermissionError when the owner is gone or not ours."""
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(own_fd, os.fstat(own_fd).st_size, pid, fd)
        except BaseException:
            os.close(own_fd)
            raise

    @property
    def address(self) -> int:
        """Returns the address of `buffer`; it holds until `close`."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def close(self) -> None:
        """Unmaps when no array or memoryview of `buffer` is left; else leaves it to them."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            try:
                self.buffer.close()
            except BufferError:
                return
