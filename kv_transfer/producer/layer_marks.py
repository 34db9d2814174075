"""How far a worker's step is, as a page of memory that its transfer processes see.

    marks[layer] = number of the last step whose KV of that layer is in the cache, plus one

On CPU the worker writes a mark when a layer is computed. On a GPU the worker's stream writes it,
after the layer's kernels and with their results visible to all: the worker never waits for the
device, and a copy that is issued after its mark was seen reads finished KV. Only steps whose KV
somebody waits for leave marks.

    1. `create` in the worker; `marks_fd` of its cache handle leads to it
    2. `attach` in each transfer process
    3. `progress`   whatever is read is true: marks only ever say less than what is done
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from host.memory_file import MemoryFile
from kv_transfer.memory.device import DeviceError
from kv_transfer.metadata import StepProgress

_MARK_BYTES = 4
_RANGE = 1 << 32


class LayerMarks:
    """`num_layers` marks of 32 bits: a device writes no more at once."""

    def __init__(self, memory: MemoryFile, num_layers: int) -> None:
        self._memory = memory
        self._num_layers = num_layers

    @classmethod
    def create(cls, num_layers: int) -> LayerMarks:
        """Creates marks on pages of its own, because devices know memory by pages."""
        num_pages = -(-num_layers * _MARK_BYTES // mmap.PAGESIZE)
        memory = MemoryFile.create("tandem-layer-marks", num_pages * mmap.PAGESIZE)
        return cls(memory, num_layers)

    @classmethod
    def attach(cls, pid: int, fd: int, num_layers: int) -> LayerMarks:
        """Raises OSError when the owner has gone."""
        return cls(MemoryFile.attach(pid, fd), num_layers)

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def num_bytes(self) -> int:
        return self._memory.size

    def write(self, step_id: int, layer: int) -> None:
        """Leaves one mark, as a worker on the CPU does."""
        marks = np.frombuffer(self._memory.buffer, np.uint32, self._num_layers)
        marks[layer] = mark_of(step_id)

    def progress(self, near_step: int) -> StepProgress | None:
        """Returns that of the newest step that has begun to leave marks; None: there was none.

        `near_step`: any step of the last weeks, because marks count modulo 2^32.
        """
        marks = np.frombuffer(self._memory.buffer, np.uint32, self._num_layers).copy()
        newest = int(marks[0])
        if newest == 0:
            return None
        distance = (newest - mark_of(near_step) + _RANGE // 2) % _RANGE - _RANGE // 2
        others = np.flatnonzero(marks != newest)
        num_layers = int(others[0]) if len(others) else self._num_layers
        return StepProgress(near_step + distance, num_layers)

    def close(self) -> None:
        self._memory.close()


def mark_of(step_id: int) -> int:
    """Returns a mark that is never 0, which says that nothing was written yet, but for one step in
    2^32."""
    return (step_id + 1) % _RANGE


class LayerMarker:
    """Writes marks when a worker on the CPU has computed a layer."""

    marks_later = False
    """Marks appear some time after `mark`, without a word to anybody."""

    def __init__(self, marks: LayerMarks) -> None:
        self._marks = marks

    def mark(self, step_id: int, layer: int) -> None:
        self._marks.write(step_id, layer)

    def close(self) -> None:
        return


class StreamMarker(LayerMarker):
    """Lets the stream on which the model runs write the marks. Costs as much as an event."""

    marks_later = True

    def __init__(self, marks: LayerMarks, current_stream: Callable[[], int]) -> None:
        """Raises `DeviceError`. The device's context must be current."""
        super().__init__(marks)
        from kv_transfer.memory.cuda_driver import cuda_driver

        self._driver = cuda_driver()
        self._current_stream = current_stream
        self._host_address = marks.address
        self._driver.register_host(self._host_address, marks.num_bytes)
        self._address = self._driver.device_address(self._host_address)

    def mark(self, step_id: int, layer: int) -> None:
        self._driver.write_value(
            self._current_stream(), self._address + _MARK_BYTES * layer, mark_of(step_id)
        )

    def close(self) -> None:
        """Waits for the device. One that has failed holds nothing any more."""
        with suppress(DeviceError):
            self._driver.synchronize_context()
            self._driver.unregister_host(self._host_address)
