"""A process that takes a tier's folder for itself, says so, and writes blocks until it is killed.

    python tier_owner.py FOLDER SECONDS     waits so long for the folder, if another one has it

It prints "mine", or why it is not. A block holds what its name says (`content`).
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_transfer.memory.pool import slot_memory
from kv_transfer.memory.pool.block_files import BlockFiles
from kv_transfer.memory.pool.slot_memory import SlotMemory, TierUnavailable

IDENTITY = b"m" * 32
NUM_SLOTS, NUM_LAYERS, PAGE_BYTES = 8, 2, 64 << 10
NUM_NAMES = 24


def name_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def content(name: bytes) -> npt.NDArray[np.uint8]:
    """Returns all bytes of a block, which differ from those of all others everywhere."""
    first = np.frombuffer(name * (NUM_LAYERS * PAGE_BYTES // len(name)), np.uint8)
    return first + np.arange(len(first), dtype=np.uint8)


def take(folder: Path, identity: bytes = IDENTITY) -> tuple[SlotMemory, BlockFiles]:
    """Takes both tiers. Raises `TierUnavailable`."""
    memory = SlotMemory.at(folder / "slots", identity, NUM_SLOTS, NUM_LAYERS, PAGE_BYTES)
    try:
        return memory, BlockFiles(folder / identity.hex()[:16], identity, memory)
    except TierUnavailable:
        memory.close()
        raise


def write(memory: SlotMemory, files: BlockFiles, number: int) -> None:
    """Puts a block into a slot and a file, as a transfer process does."""
    name, slot = name_of(number % NUM_NAMES), number % NUM_SLOTS
    memory.clear(slot)
    memory.slot(slot)[:] = content(name)
    memory.put(slot, name, memory.checksums(slot))
    files.write(slot)


def main() -> None:
    slot_memory._LOCK_TIMEOUT_S = float(sys.argv[2])
    try:
        memory, files = take(Path(sys.argv[1]))
    except TierUnavailable as error:
        print(error, flush=True)
        return
    print("mine", flush=True)
    for number in itertools.count():
        write(memory, files, number)


if __name__ == "__main__":
    main()
