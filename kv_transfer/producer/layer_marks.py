"""How far a worker's step is, as a page of memory that its transfer processes see.

    marks[layer] = number of the last step whose KV of that layer is in the cache, plus one

On CPU the worker writes a mark when a layer is computed. On a GPU the worker's stream writes it,
after the layer's kernels and with their results visible to all: the worker never waits for the
device, and a copy that is issued after its mark was seen reads finished KV. Only steps whose KV
something waits for leave marks.

    1. `create` in the worker; `marks_fd` of its cache handle leads to it
    2. `attach` in each transfer process
    3. `progress`   whatever is read is true: marks only ever say less than what is done
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kv_transfer.memory.marks_page import MARK_BYTES, DevicePage, MarksPage
from kv_transfer.metadata import StepProgress

_RANGE = 1 << 32


class LayerMarks(MarksPage):
    """`num_layers` marks."""

    name = "tandem-layer-marks"

    def write(self, step_id: int, layer: int) -> None:
        """Leaves one mark, as a worker on the CPU does."""
        marks = np.frombuffer(self._memory.buffer, np.uint32, self.num_layers)
        marks[layer] = mark_of(step_id)

    def progress(self, near_step: int) -> StepProgress | None:
        """Returns that of the newest step that has begun to leave marks; None: there was none.

        `near_step`: any step of the last weeks, because marks count modulo 2^32.
        """
        marks = np.frombuffer(self._memory.buffer, np.uint32, self.num_layers).copy()
        newest = int(marks[0])
        if newest == 0:
            return None
        distance = (newest - mark_of(near_step) + _RANGE // 2) % _RANGE - _RANGE // 2
        others = np.flatnonzero(marks != newest)
        num_layers = int(others[0]) if len(others) else self.num_layers
        return StepProgress(near_step + distance, num_layers)


def mark_of(step_id: int) -> int:
    """Returns a mark that is never 0, which says that nothing was written yet, but for one step in
    2^32."""
    return (step_id + 1) % _RANGE


class LayerMarker:
    """Writes marks when a worker on the CPU has computed a layer."""

    marks_later = False
    """Marks appear some time after `mark`, without a notice."""

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
        self._page = DevicePage(marks)
        self._current_stream = current_stream

    def mark(self, step_id: int, layer: int) -> None:
        address = self._page.address + MARK_BYTES * layer
        self._page.driver.write_value(self._current_stream(), address, mark_of(step_id))

    def close(self) -> None:
        self._page.close()
