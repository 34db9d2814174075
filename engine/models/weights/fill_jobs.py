"""Says which bytes fill a parameter, and fills it from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from engine.layers.shard import CheckpointWeight, TensorSlice
from engine.models.files.content_digests import block_bytes
from engine.models.files.index_numbers import check_indices
from engine.models.files.passing_digests import Block
from engine.models.files.stored_tensors import StoredTensor
from engine.models.files.weight_files import WeightFiles
from engine.models.files.weight_reader import Piece
from tandem_kernels.checksums.xxh3_sizes import is_hashed_on_gpu

STORED_TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Maps what safetensors calls a type of numbers."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a tensor of the checkpoint: where they lie, and the part of them that is asked
    for.

    Attributes:
        shape: Of what lies there.
        dim: The dimension behind the first that is cut from `start` on; None: none.
        is_turned: What lies there is the transposed matrix.
    """

    tensor: StoredTensor
    first: int
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    count: int = 0
    is_turned: bool = False

    @classmethod
    def of(cls, part: TensorSlice, tensor: StoredTensor) -> StoredRows:
        if tensor.num_columns:
            return cls._turned(part, tensor)
        if part.index is not None:
            size = (tensor.stop - tensor.start) // tensor.shape[0]
            start = tensor.start + part.index * size
            tensor = replace(tensor, shape=tensor.shape[1:], start=start, stop=start + size)
        if part.dim == 0:
            return cls(tensor, part.start, (part.count, *tensor.shape[1:]))
        if part.dim is None or part.count == tensor.shape[part.dim]:
            return cls(tensor, 0, tensor.shape)
        return cls(tensor, 0, tensor.shape, part.dim, part.start, part.count)

    @classmethod
    def _turned(cls, part: TensorSlice, tensor: StoredTensor) -> StoredRows:
        """Returns the rows of the matrix whose columns are the tensor's rows."""
        outputs, inputs = tensor.shape
        cut = part.start, part.count
        first, count = cut if part.dim == 1 else (0, inputs)
        start, width = cut if part.dim == 0 else (0, outputs)
        shape = count, tensor.num_columns
        return cls(tensor, first, shape, 1, tensor.column + start, width, is_turned=True)

    @property
    def row_bytes(self) -> int:
        return STORED_TYPES[self.tensor.dtype].itemsize * prod(self.shape[1:])

    def rows(self, start: int, stop: int) -> StoredRows:
        """Returns rows `start` to `stop` of these."""
        shape = (stop - start, *self.shape[1:])
        return StoredRows(self.tensor, self.first + start, shape, self.dim, self.start, self.count)

    @property
    def block(self) -> Block:
        """Returns the bytes of the file."""
        start = self.tensor.start + self.first * self.row_bytes
        num_rows = self.shape[0] if self.shape else 1
        return self.tensor.file, start, start + num_rows * self.row_bytes

    def piece(
        self, into: Tensor | None = None, *, is_kept: bool = False, is_hashed: bool = True
    ) -> Piece:
        return Piece(*self.block, into, is_kept, block_bytes(self.row_bytes) if is_hashed else 0)

    def on_host(self, memory: Tensor) -> Tensor:
        """Returns the numbers in `memory`, [bytes] uint8 of `piece`."""
        return memory.view(STORED_TYPES[self.tensor.dtype]).view(self.shape)

    def numbers(self, memory: Tensor, device: torch.device) -> Tensor:
        """Returns what was asked for, in `shape` but cut by `dim`, on `device`, out of `memory`
        [bytes] uint8 of `piece`. The cut is made there: rows are read as a whole."""
        rows = self.on_host(memory).to(device, non_blocking=_is_read_by(device, memory))
        asked = rows if self.dim is None else rows.narrow(self.dim, self.start, self.count)
        return asked.t() if self.is_turned else asked


@dataclass(frozen=True, slots=True)
class FillJob:
    """Fills a parameter, or some of its rows.

    Attributes:
        target: The rows.
        is_verbatim: They are the bytes of the file, as they lie there.
    """

    weight: CheckpointWeight
    target: Tensor
    stored: tuple[StoredRows, ...]
    is_verbatim: bool = False

    @property
    def is_direct(self) -> bool:
        """Returns whether bytes are read into the parameter itself."""
        return self.is_verbatim and self.target.device.type == "cpu"

    @property
    def is_hashed_on_gpu(self) -> bool:
        """Returns whether a GPU hashes the target, so that those who read need not."""
        on_gpu = self.is_verbatim and self.target.device.type == "cuda"
        return on_gpu and is_hashed_on_gpu(self.target)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        into = self.target if self.is_direct else None
        # What a format makes of its tensors on a CPU may be a view of them, and wait for others.
        is_kept, is_hashed = self.weight.fill is not None, not self.is_hashed_on_gpu
        return tuple(rows.piece(into, is_kept=is_kept, is_hashed=is_hashed) for rows in self.stored)

    def fill(self, memory: list[Tensor]) -> None:
        """Fills the target from the bytes of `pieces`, each [bytes] uint8 on the host. A GPU may
        still have to read those that are pinned, in the order of its stream. Raises
        `CheckpointError`: numbers that index something are out of range."""
        if self.is_direct:
            return
        if self.is_verbatim:
            [part] = memory
            is_on_its_way = _is_read_by(self.target.device, part)
            self.target.copy_(self.stored[0].on_host(part), non_blocking=is_on_its_way)
            return
        device = self.target.device
        numbers = [
            rows.numbers(part, device) for rows, part in zip(self.stored, memory, strict=True)
        ]
        if (below := self.weight.below) is not None and self.weight.fill is None:
            check_indices(self.weight.name, numbers[0], below)
        fill_weight(self.weight, self.target, *numbers)


def _is_read_by(device: torch.device, memory: Tensor) -> bool:
    """Returns whether a device copies from the memory by itself, while the host goes on."""
    return device.type == "cuda" and memory.is_pinned()


def fill_weight(
    weight: CheckpointWeight, target: Tensor, stored: Tensor, *companions: Tensor
) -> None:
    """Fills `target`, the parameter or some of its rows, from `stored`, of the same shape unless
    the weight has a `fill` of its own."""
    if weight.fill is not None:
        weight.fill(stored, *companions)
        return
    if weight.order is not None:
        stored = stored.index_select(0, weight.order.to(stored.device))
    target.copy_(stored)
    if weight.offset:
        target.add_(weight.offset)


def fill_jobs(weight: CheckpointWeight, files: WeightFiles) -> Iterator[FillJob]:
    """Yields what fills a parameter: a job for this many rows as make a piece, or one where all of
    it is needed at once."""
    stored = tuple(StoredRows.of(part, files.tensors[part.name]) for part in weight.slices)
    whole, target = stored[0], weight.target
    if whole.is_turned and target.numel() == 0:
        return
    if whole.is_turned or weight.fill is not None or weight.order is not None or not whole.shape:
        yield FillJob(weight, target, stored)
        return
    is_verbatim = (
        whole.dim is None
        and not weight.offset
        and weight.below is None
        and target.is_contiguous()
        and target.dtype == STORED_TYPES[whole.tensor.dtype]
    )
    num_rows = whole.shape[0]
    step = max(1, block_bytes(whole.row_bytes) // max(1, whole.row_bytes))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        part = (whole.rows(start, stop),)
        yield FillJob(weight, target[start:stop], part, is_verbatim)
