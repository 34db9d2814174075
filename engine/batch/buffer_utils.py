"""Two kinds of per-row tensors, distinguished by who owns the truth.

    HostBackedTensor     the host owns it: write `np`, all of which goes to the device
    StagedWriteTensor    the device owns it: the host stages ragged writes, which go there

A `Carrier` takes what has changed in any number of them to the device, in one launch a step and
without a copy: a prompt that comes alone waits for each call of the driver. Kernels change a
`StagedWriteTensor` in between (a sampled token is appended, a count advances), so the host must
never copy the whole of it. All device memory keeps its address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem_kernels import ops
from tandem_kernels.batch.batch_tables import WordTables

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


_WORD_BYTES = 4
_ALIGNMENT = 16
"""Bytes. Kernels are compiled anew for addresses that are less aligned than others before."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a device copy of a temporary array. The host does not wait for it."""
    return _staged(array, device).to(device, non_blocking=True)


def to_device_together(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device
) -> list[torch.Tensor]:
    """Returns device copies of several temporary arrays, made in one transfer."""
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) for array in arrays)]) * _ALIGNMENT
    packed = np.empty(max(int(starts[-1]), 1), np.uint8)  # torch cannot slice an empty one
    for start, array in zip(starts[:-1].tolist(), arrays, strict=True):
        packed[start : start + array.nbytes] = array.view(np.uint8)
    on_device = to_device(packed, device)
    return [
        on_device[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype])
        for start, array in zip(starts[:-1].tolist(), arrays, strict=True)
    ]


def upload(array: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Sets `target[:] = array` after what the device does now. The host does not wait for it."""
    target.copy_(_staged(array, target.device), non_blocking=True)


def _staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns the array in pinned memory for a GPU, which torch reuses only after the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def with_rows(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns a larger copy of `table` [rows, columns], with zeros behind what it holds."""
    larger = table.new_zeros((num_rows, table.shape[1]))
    larger[: len(table)] = table
    return larger


Words = npt.NDArray[np.int32]
"""Numbers of 4 or 8 bytes, taken 4 bytes at a time."""


class CarriedTensor(Protocol):
    """The part of either kind that a `Carrier` needs. `tensor` is contiguous."""

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def has_changes(self) -> bool: ...
    def take_changes(self) -> list[tuple[int, Words]]:
        """Returns the changes, each with its first word in `tensor`; they count as sent from now
        on."""
        ...


class Carrier:
    """Carries changes of `tensors` to the device."""

    def __init__(self, tensors: Iterable[CarriedTensor], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._device = device
        self._tables = WordTables.of([carried.tensor for carried in self._tensors])
        self._ring = PinnedRing(device)

    def carry_over(self) -> None:
        """Carries all changes there are. No change costs nothing."""
        places: list[tuple[int, int, int, int]] = []
        pieces: list[Words] = []
        start = 0
        for table, carried in enumerate(self._tensors):
            for first, words in carried.take_changes() if carried.has_changes else ():
                places.append((table, first, start, len(words)))
                pieces.append(words)
                start += len(words)
        if not pieces:
            return
        described = np.array(places, np.int64)
        described[:, 2] += described.nbytes // _WORD_BYTES  # Pieces lie behind what describes them.
        longest = int(described[:, 3].max())
        with self._ring.filled([described.reshape(-1).view(np.int32), *pieces]) as packed:
            to = self._tables
            ops.write_pieces(to.addresses, to.words, packed, len(pieces), longest)


class PinnedRing:
    """Memory of the host that kernels read: parts that take turns.

    1. `filled`   the next part is written, once the kernel that read it last has ended
    2. a kernel that reads it is launched within the `with` block

    What is larger than a part is copied to the device.
    """

    def __init__(self, device: torch.device, part_words: int = 1 << 18, num_parts: int = 4) -> None:
        """Takes pinned memory for a GPU."""
        is_gpu = device.type == "cuda"
        self._device = device
        self._parts = [
            torch.empty(part_words, dtype=torch.int32, pin_memory=is_gpu) for _ in range(num_parts)
        ]
        self._arrays = [part.numpy() for part in self._parts]
        self._read: list[torch.cuda.Event] = []
        """Each tells when a part was read; there are none on a CPU."""
        for _ in self._parts if is_gpu else ():
            self._read.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._next = 0

    @contextmanager
    def filled(self, pieces: Sequence[Words]) -> Iterator[torch.Tensor]:
        """Yields the pieces, one behind the other, as a device reads them."""
        num_words = sum(map(len, pieces))
        if num_words > len(self._arrays[0]):
            yield to_device(np.concatenate(pieces), self._device)
            return
        index = self._next
        self._next = (index + 1) % len(self._parts)
        if self._read:
            self._read[index].synchronize()
        np.concatenate(pieces, out=self._arrays[index][:num_words])
        yield self._parts[index]
        if self._read:
            self._read[index].record()


class HostBackedTensor:
    """`np` is the truth. `tensor` is what kernels of the next step read, once carried over."""

    def __init__(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, device: torch.device
    ) -> None:
        self.np: npt.NDArray[Any] = np.zeros(shape, dtype)
        self.tensor = torch.zeros(shape, dtype=_TORCH_DTYPES[self.np.dtype], device=device)
        self.has_changes = False

    def write(self, index: Any, value: Any) -> None:
        """Sets `np[index] = value` and marks it to be carried over."""
        self.np[index] = value
        self.has_changes = True

    def take_changes(self) -> list[tuple[int, Words]]:
        self.has_changes = False
        return [(0, self.np.reshape(-1).view(np.int32))]


class StagedWriteTensor:
    """`tensor` `[rows, columns]` or `[rows]`; the host knows only what it stages.

    Writes that are carried over together must not overlap: the kernel does them all at once.
    """

    def __init__(
        self, shape: tuple[int, int] | tuple[int], dtype: npt.DTypeLike, device: torch.device
    ) -> None:
        self._dtype = np.dtype(dtype)
        self.tensor = torch.zeros(shape, dtype=_TORCH_DTYPES[self._dtype], device=device)
        self._shape = shape if len(shape) == 2 else (*shape, 1)
        self._changes: list[tuple[int, Words]] = []

    def stage_write(self, row: int, start: int, values: Sequence[int] | npt.NDArray[Any]) -> None:
        """Stages `tensor[row, start : start + len(values)] = values`.

        Raises:
            IndexError: The values do not lie inside the row.
        """
        num_rows, num_columns = self._shape
        if not 0 <= row < num_rows or start < 0 or start + len(values) > num_columns:
            raise IndexError(
                f"columns {start} to {start + len(values)} of row {row} are outside "
                f"a table of {num_rows} rows and {num_columns} columns"
            )
        if len(values) == 0:
            return
        words = np.ascontiguousarray(values, self._dtype).view(np.int32)
        first = (row * num_columns + start) * (self._dtype.itemsize // _WORD_BYTES)
        self._changes.append((first, words))

    def stage_value(self, row: int, value: int) -> None:
        """Stages `tensor[row] = value`, for a tensor of one column."""
        self.stage_write(row, 0, (value,))

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def take_changes(self) -> list[tuple[int, Words]]:
        changes, self._changes = self._changes, []
        return changes
