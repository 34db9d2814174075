"""From the tensors of a KV cache to the handle that another process maps it by.

The tensors know their address; the kernel knows which file lies there (/proc/self/maps) and
under which descriptor we hold it (/proc/self/fd).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kv_transfer.base import KVCacheHandle


def handle_of_tensors(rank: int, kv_caches: list[Any]) -> KVCacheHandle:
    """`kv_caches`: views `[num_blocks, ...]` of one memory file, the first at its start.

    Raises:
        ValueError: They do not lie in a file of this process.
    """
    inode = _inode_at(kv_caches[0].data_ptr())
    return KVCacheHandle(
        rank=rank, pid=os.getpid(), fd=_descriptor_of(inode), num_blocks=len(kv_caches[0])
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
