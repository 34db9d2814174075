"""How far loads from the host tier are, layer by layer, as a page that worker and transfer
processes share.

    marks[place][layer] = number of the last load in that place whose layer is in the cache

    1. `create` in the worker; `load_marks_fd` of its cache handle leads to it
    2. `attach` in each transfer process, which marks its layers when their bytes are in the blocks
       and were found to be right; and in the engine core, which calls `release` when a load failed
    3. the worker waits before each layer (`LoadGate`), on a GPU without stopping (`StreamGate`)

A place has one load at a time, and numbers grow; so a mark that is higher than the number that
something waits for lets him go too, and a mark of another place never does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from host.memory_file import MemoryFile
from host.process_host import ProcessHost
from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import KVLayout
from kv_transfer.memory.marks_page import MARK_BYTES, DevicePage, MarksPage
from kv_transfer.tier import LoadTicket

NUM_PLACES = 4
"""Loads that may be followed at once; others are used when they are complete."""
_LAST_NUMBER = (1 << 31) - 1
"""The device compares as if marks were signed."""
_PAUSE_S = 0.00005


class LoadMarks(MarksPage):
    """`NUM_PLACES` times `num_layers` marks."""

    name = "tandem-load-marks"
    rows = NUM_PLACES

    def __init__(self, memory: MemoryFile, num_layers: int) -> None:
        super().__init__(memory, num_layers)
        shape = NUM_PLACES, num_layers
        count = NUM_PLACES * num_layers
        self._marks = np.frombuffer(memory.buffer, np.uint32, count).reshape(shape)

    def offset_of(self, place: int, layer: int) -> int:
        return (place * self.num_layers + layer) * MARK_BYTES

    def write(self, ticket: LoadTicket, layer: int) -> None:
        """Says that the layer's KV is in the blocks, and right."""
        self._marks[ticket.place, layer] = ticket.number

    def release(self, ticket: LoadTicket) -> None:
        """Lets a step go on whose result nothing will use. Nothing may write to the marks of this
        load any more."""
        self._marks[ticket.place] = ticket.number

    def is_there(self, ticket: LoadTicket, layer: int) -> bool:
        return int(self._marks[ticket.place, layer]) >= ticket.number

    def close(self) -> None:
        del self._marks
        super().close()


class LoadMarksOfRanks:
    """Those of all ranks, in the engine core. Where it does not see one of them, because the rank
    is on another host or in this very process, no step may wait: nothing could let it go. Stages of
    a pipeline have layers of their own, and wait for loads as a whole."""

    def __init__(
        self, layout: KVLayout, handles: Sequence[KVCacheHandle], hosts: Sequence[ProcessHost]
    ) -> None:
        self._marks: list[LoadMarks] = []
        is_here = not layout.stage_starts and all(host.link is None for host in hosts)
        if is_here and all(h.load_marks_fd >= 0 and h.pid != os.getpid() for h in handles):
            self._marks = [
                LoadMarks.attach(handle.pid, handle.load_marks_fd, layout.num_layers)
                for handle in handles
            ]

    @property
    def num_places(self) -> int:
        return NUM_PLACES if self._marks else 0

    def release(self, ticket: LoadTicket) -> None:
        """Lets the step that waits with this ticket go on, on every rank."""
        for marks in self._marks:
            marks.release(ticket)

    def close(self) -> None:
        """Lets every step go on, because the engine ends or has another role. Idempotent."""
        for place in range(self.num_places):
            self.release(LoadTicket(place, _LAST_NUMBER))
        for marks in self._marks:
            marks.close()
        self._marks.clear()


class LoadGate:
    """The worker's side on the CPU: `wait` returns when the layer is there."""

    def __init__(self, marks: LoadMarks) -> None:
        self.marks = marks

    def wait(self, ticket: LoadTicket, layer: int) -> None:
        """Waits until the KV of a layer is in the cache; of a layer that does not exist, never."""
        if layer >= self.marks.num_layers:
            return
        while not self.marks.is_there(ticket, layer):
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        self.marks.close()


class StreamGate(LoadGate):
    """Lets the stream on which the model runs wait; the worker launches kernels meanwhile."""

    def __init__(self, marks: LoadMarks, current_stream: Callable[[], int]) -> None:
        """Raises `DeviceError`. The device's context must be current."""
        super().__init__(marks)
        self._page = DevicePage(marks)
        self._current_stream = current_stream

    def wait(self, ticket: LoadTicket, layer: int) -> None:
        if layer < self.marks.num_layers:
            address = self._page.address + self.marks.offset_of(ticket.place, layer)
            self._page.driver.wait_value(self._current_stream(), address, ticket.number)

    def close(self) -> None:
        self._page.close()
        super().close()


def create_gate(num_layers: int, current_stream: Callable[[], int] | None) -> LoadGate:
    """Makes the gate of a worker, with its marks."""
    marks = LoadMarks.create(num_layers)
    return LoadGate(marks) if current_stream is None else StreamGate(marks, current_stream)
