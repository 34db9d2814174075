"""Host memory that behaves like a GPU: copies are issued now and done when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from kv_transfer.memory.devices.copy_stream import CopyStream, Fence, HostCopyStream, Numbers
from kv_transfer.memory.devices.host_device import HostDevice


class LateFence(Fence):
    def __init__(self, stream: LateStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def is_done(self) -> bool:
        return self._stream.num_done >= self._position

    def wait(self) -> None:
        self._stream.run(self._position - self._stream.num_done)


class LateStream(CopyStream):
    """Copies read their source when they run, as a device does."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._host = HostCopyStream()
        self._issued: list[Callable[[], None]] = []
        self.num_done = 0

    @property
    def num_waiting(self) -> int:
        return len(self._issued) - self.num_done

    def run(self, count: int = 1 << 30) -> None:
        """The next `count` copies."""
        for copy in self._issued[self.num_done : self.num_done + max(0, count)]:
            copy()
            self.num_done += 1

    def copy(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, in_portions: bool = False
    ) -> None:
        """One after the other, the last first: their order means nothing."""
        for i in reversed(range(len(targets))):
            one = slice(i, i + 1)
            self._issue(partial(self._host.copy, targets[one], sources[one], sizes[one]))

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        row_bytes: int,
        num_rows: int,
    ) -> None:
        self._issue(
            partial(
                self._host.copy_rows,
                target,
                target_pitch,
                source,
                source_pitch,
                row_bytes,
                num_rows,
            )
        )

    def fence(self) -> Fence:
        return LateFence(self, len(self._issued))

    def close(self) -> None:
        self.run()

    def _issue(self, copy: Callable[[], None]) -> None:
        self._issued.append(copy)
        if not self._device.is_held:
            self.run()


class LateDevice(HostDevice):
    """While `is_held`, nothing is copied but by `LateStream.run`."""

    copies_at_once = False

    def __init__(self, is_held: bool = True) -> None:
        self.is_held = is_held
        self.streams: list[LateStream] = []
        self.num_pinned_bytes = 0

    @property
    def stream(self) -> LateStream:
        (stream,) = self.streams
        return stream

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        self.num_pinned_bytes += memory.nbytes

    def new_stream(self) -> CopyStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def go(self) -> None:
        """Everything, and from now on at once."""
        self.is_held = False
        for stream in self.streams:
            stream.run()
