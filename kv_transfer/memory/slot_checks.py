"""Compares what slots of host memory hold with their checksums, beside the copies of a load.

    1. `SlotChecks(memory, num_threads)`
    2. `begin(slots)`         all layers are compared, one behind the other, each by all threads
    3. `wrong_in(place)`      waits for one of them
    4. `close`                waits for what has begun

A load reads each byte twice: once for its checksum, once for the device. The checksum is the dearer
one where a device copies by itself, so it is begun for all layers at once and not layer by layer:
threads never wait for copies, nor the copies for them, until a layer is marked.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kv_transfer.memory.slot_memory import SlotMemory


class LayerChecks:
    """The layers of one load. `found[place]`: what each thread says of its slots."""

    def __init__(self, found: list[list[asyncio.Future[set[int]]]]) -> None:
        self._found = found

    async def wrong_in(self, place: int) -> set[int]:
        """Returns slots whose checksum is not what it was."""
        return set().union(*await asyncio.gather(*self._found[place]))


class SlotChecks:
    """Lives on one event loop."""

    def __init__(self, memory: SlotMemory, num_threads: int) -> None:
        self._memory = memory
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "checks")

    def begin(self, slots: list[int]) -> LayerChecks:
        """Begins to compare all layers of these slots, the first layer first."""
        run = asyncio.get_running_loop().run_in_executor
        parts = [slots[i :: self._num_threads] for i in range(min(self._num_threads, len(slots)))]
        return LayerChecks(
            [
                [run(self._threads, self._wrong, part, place) for part in parts]
                for place in range(self._memory.num_layers)
            ]
        )

    def close(self) -> None:
        self._threads.shutdown()

    def _wrong(self, slots: list[int], place: int) -> set[int]:
        memory = self._memory
        return {s for s in slots if memory.checksum(s, place) != memory.known_checksum(s, place)}
