"""Two kinds of per-row tensors, told apart by who owns the truth.

    HostBackedTensor     the host owns it: write `np`, all of which goes to the device
    StagedWriteTensor    the device owns it: the host stages ragged writes, which go there

`carry_over` takes what has changed in any number of them to the device, in one transfer a step.
Kernels change a `StagedWriteTensor` in between (a sampled token is appended, a count advances), so
the host must never copy the whole of it. All device memory keeps its address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem_kernels import ops

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


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


class CarriedTensor(Protocol):
    """The part of either kind that `carry_over` needs."""

    @property
    def has_changes(self) -> bool: ...
    def take_changes(self) -> list[npt.NDArray[Any]]:
        """Returns the changes as flat arrays; they count as sent from now on."""
        ...

    def accept(self, changes: Sequence[torch.Tensor]) -> None:
        """Applies the changes on the device."""
        ...


def carry_over(tensors: Iterable[CarriedTensor], device: torch.device) -> None:
    """Changes of all of them, in one transfer. No change costs nothing."""
    changed = [tensor for tensor in tensors if tensor.has_changes]
    if not changed:
        return
    parts = [tensor.take_changes() for tensor in changed]
    on_device = iter(to_device_together([array for part in parts for array in part], device))
    for tensor, part in zip(changed, parts, strict=True):
        tensor.accept([next(on_device) for _ in part])


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

    def take_changes(self) -> list[npt.NDArray[Any]]:
        self.has_changes = False
        return [self.np.reshape(-1)]

    def accept(self, changes: Sequence[torch.Tensor]) -> None:
        (whole,) = changes
        self.tensor.copy_(whole.view(self.tensor.shape))


class StagedWriteTensor:
    """`tensor` `[rows, columns]` or `[rows]`; the host knows only what it stages.

    Writes that are carried over together must not overlap: the kernel does them all at once.
    """

    def __init__(
        self, shape: tuple[int, int] | tuple[int], dtype: npt.DTypeLike, device: torch.device
    ) -> None:
        self._dtype = np.dtype(dtype)
        self.tensor = torch.zeros(shape, dtype=_TORCH_DTYPES[self._dtype], device=device)
        self._base = self.tensor if len(shape) == 2 else self.tensor.unsqueeze(1)
        self._rows: list[int] = []  # [edits]
        self._starts: list[int] = []  # [edits]
        self._cu_lens: list[int] = [0]  # [edits + 1]
        self._values: list[npt.NDArray[Any]] = []  # [edits], ragged

    def stage_write(self, row: int, start: int, values: Sequence[int] | npt.NDArray[Any]) -> None:
        """Stages `tensor[row, start : start + len(values)] = values`.

        Raises:
            IndexError: The values do not lie inside the row.
        """
        num_rows, num_columns = self._base.shape
        if not 0 <= row < num_rows or start < 0 or start + len(values) > num_columns:
            raise IndexError(
                f"columns {start} to {start + len(values)} of row {row} are outside "
                f"a table of {num_rows} rows and {num_columns} columns"
            )
        if len(values) == 0:
            return
        self._rows.append(row)
        self._starts.append(start)
        self._cu_lens.append(self._cu_lens[-1] + len(values))
        self._values.append(np.asarray(values, self._dtype))

    def stage_value(self, row: int, value: int) -> None:
        """Stages `tensor[row] = value`, for a tensor of one column."""
        self.stage_write(row, 0, (value,))

    @property
    def has_changes(self) -> bool:
        return bool(self._rows)

    def take_changes(self) -> list[npt.NDArray[Any]]:
        edits = (self._rows, self._starts, self._cu_lens)
        changes = [np.array(numbers, np.int32) for numbers in edits]
        changes.append(np.concatenate(self._values))
        self._rows.clear()
        self._starts.clear()
        self._values.clear()
        self._cu_lens[:] = [0]
        return changes

    def accept(self, changes: Sequence[torch.Tensor]) -> None:
        rows, starts, cu_lens, values = changes
        ops.apply_staged_writes(self._base, rows, starts, cu_lens, values)
