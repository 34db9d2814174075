"""Files of the tiers: whatever lies there, a block that comes back is the block that was stored."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from kv_transfer.memory.pool.block_files import BlockFiles
from kv_transfer.memory.pool.slot_memory import SlotMemory, TierUnavailable
from tests.fuzz.damage import damaged
from tests.fuzz.target import Fault, Target, judged

_IDENTITY = b"i" * 32
_SHAPE = (4, 2, 256)
"""Slots, layers, bytes of a page."""
_NAMES = [hashlib.sha256(b"%d" % i).digest() for i in range(3)]


def _content(name: bytes) -> np.ndarray:  # type: ignore[type-arg]
    """Returns what the block of a name holds, all layers."""
    return np.frombuffer(hashlib.shake_256(name).digest(_SHAPE[1] * _SHAPE[2]), np.uint8)


@cache
def _folder() -> Path:
    shared = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(
        prefix="tandem-fuzz-", dir=str(shared) if shared.is_dir() else None
    )
    _folder.kept = made  # type: ignore[attr-defined]
    return Path(made.name)


def _fill(memory: SlotMemory) -> None:
    for slot, name in enumerate(_NAMES):
        memory.slot(slot)[:] = _content(name)
        memory.put(slot, name, memory.checksums(slot))


@cache
def _block_file() -> tuple[Path, bytes]:
    """Returns where the file of the first block lies, in its tier, and its bytes."""
    place = _folder() / "origin"
    memory = SlotMemory.anonymous(*_SHAPE)
    _fill(memory)
    files = BlockFiles(place, _IDENTITY, memory)
    files.write(0)
    files.close()
    [path] = place.glob("??/*")
    return path.relative_to(place), path.read_bytes()


@cache
def _slots_file() -> bytes:
    path = _folder() / "slots"
    memory = SlotMemory.at(path, _IDENTITY, *_SHAPE)
    _fill(memory)
    memory.close()
    with path.open("rb") as file:
        return file.read(64 << 10)  # Header and records; the rest is far behind.


def _check_block(data: bytes) -> None:
    place = _folder() / "tier"
    shutil.rmtree(place, ignore_errors=True)
    where, _ = _block_file()
    (place / where).parent.mkdir(parents=True)
    (place / where).write_bytes(data)
    memory = SlotMemory.anonymous(*_SHAPE)
    files = BlockFiles(place, _IDENTITY, memory)
    try:
        found = files.scan()
        if not set(found) <= {_NAMES[0]}:
            raise Fault(f"a file is taken for the blocks {found}")
        if files.read(_NAMES[0], 1) and not np.array_equal(memory.slot(1), _content(_NAMES[0])):
            raise Fault("a block is another one")
    finally:
        files.close()


def _check_slots(data: bytes) -> None:
    path = _folder() / "slots"
    with path.open("r+b") as file:
        file.write(data[: 64 << 10])
    memory = judged(lambda: SlotMemory.at(path, _IDENTITY, *_SHAPE), TierUnavailable)
    if memory is None:
        return
    try:
        for slot, name in memory.contents().items():
            is_right = memory.checksums(slot) == memory.known_checksums(slot)
            if is_right and not np.array_equal(memory.slot(slot), _content(name)):
                raise Fault(f"slot {slot} has another block than {name.hex()}")
    finally:
        memory.close()
        if path.stat().st_size > 4 << 20:
            raise Fault("the file has grown")
        with path.open("r+b") as file:
            file.write(_slots_file())


TARGETS = [
    Target(
        name="block_files",
        inputs=st.deferred(lambda: damaged(st.just(_block_file()[1]), 4)),
        check=_check_block,
        examples=400,
    ),
    Target(
        name="slots_files",
        inputs=st.deferred(lambda: damaged(st.just(_slots_file()[:8192]), 4)),
        check=_check_slots,
        examples=400,
    ),
]
