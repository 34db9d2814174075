"""Ways to sum over ranks in prefill that `bench.engine.overlap` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from bench.engine.ranks.model import ShardedModel, Span
from engine.layers.linear import RowParallelLinear
from engine.layers.residual import ResidualStream
from engine.parallel.distributed import ParallelGroup
from tandem_kernels import ops

Kind = Literal["serial", "no sums", "apart", "scattered", "halves", "tiles"]


@dataclass(frozen=True, slots=True)
class Way:
    """Attributes:
    parts: Pieces of the tokens, or of the rows of a GEMM.
    ctas: Blocks of threads that NCCL may take at most, ahead of GEMMs that wait for room; 0: as
        many as it likes, and when there is room.
    """

    kind: Kind
    parts: int = 1
    ctas: int = 0

    @property
    def name(self) -> str:
        parts = f" {self.parts}" if self.kind == "tiles" else ""
        return f"{self.kind}{parts}" + (f", {self.ctas} CTAs" if self.ctas else "")


def ways_of(ctas: list[int]) -> list[Way]:
    """Returns all ways; those that overlap, with each number of `ctas`."""
    beside = [Way("halves", 2), Way("tiles", 2), Way("tiles", 4)]
    overlapped = [Way(way.kind, way.parts, count) for count in ctas for way in beside]
    return [Way("serial"), Way("no sums"), Way("apart"), Way("scattered"), *overlapped]


class BegunSums(ParallelGroup):
    """Sums that begin where a GEMM ends, and that the next norm waits for.

    Args:
        transport: A process group of torch.
        way: What to do; not of kind "serial".
    """

    def __init__(self, group: ParallelGroup, transport: Any, way: Way) -> None:
        super().__init__(group.rank, 1)
        self.size = group.size
        self.way = way
        self._transport = transport
        self._begun: dict[int, list[Any]] = {}

    @property
    def fuses_norm(self) -> bool:
        return True

    def begin(self, out: Tensor, part: Tensor) -> None:
        """Begins to sum `part`, some rows of `out`, in place."""
        if self.way.kind in ("halves", "tiles"):
            self._begun.setdefault(out.data_ptr(), []).append(self._transport.allreduce([part]))

    def finish(self, out: Tensor) -> None:
        """Waits for what has begun of `out`."""
        for work in self._begun.pop(out.data_ptr(), []):
            work.wait()

    def add_to(self, layer: RowParallelLinear, stream: ResidualStream, x: Tensor) -> None:
        """Does what the layer's does; of halves, `finish` has yet to be called."""
        weight = layer.weight.t()
        out = stream.sum if self.rank == 0 else x.new_empty(len(x), weight.shape[1])
        parts = self.way.parts if self.way.kind == "tiles" else 1
        for rows, to in zip(x.tensor_split(parts), out.tensor_split(parts), strict=True):
            if self.rank == 0:
                to.addmm_(rows, weight)
            else:
                torch.mm(rows, weight, out=to)
            self.begin(out, to)
        stream.sum = out
        if self.way.kind != "halves":
            self.finish(out)

    def reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Gives each rank the sum of its share of the rows, of which alone it keeps the stream."""
        if self.way.kind != "scattered":
            return None
        rows = slice(self.rank * len(x) // self.size, (self.rank + 1) * len(x) // self.size)
        own = x.new_empty(len(x) // self.size, x.shape[1])
        if x.device.type == "cpu":
            self._transport.allreduce([x]).wait()
            own.copy_(x[rows])
        else:
            self._transport._reduce_scatter_base(own, x).wait()
        normed, total = ops.fused_add_rms_norm(own, residual[rows], weight, eps)
        if total.data_ptr() != residual[rows].data_ptr():
            residual[rows] = total
        if x.device.type == "cpu":
            parts = [torch.empty_like(normed) for _ in range(self.size)]
            self._transport.allgather([parts], [normed]).wait()
            return torch.cat(parts)
        self._transport._allgather_base(x, normed).wait()
        return x


@contextmanager
def applied(
    way: Way, model: ShardedModel, group: ParallelGroup, transport: Any
) -> Iterator[Callable[[Tensor], None]]:
    """Makes the model sum this way until the end of the block. Gives what a stream is to be handed
    to before it is read."""
    if way.kind == "serial":
        yield lambda stream: None
        return
    sums = BegunSums(group, transport, way)
    with ExitStack() as patches:
        for layer in model.row_layers():
            if way.kind in ("apart", "scattered"):
                patches.enter_context(patch.object(layer, "shared_residual_rows", 0))
                if way.kind == "scattered":
                    patches.enter_context(patch.object(layer, "group", sums))
                continue

            def add_to(
                stream: ResidualStream, x: Tensor, norm: None = None, own: Any = layer
            ) -> None:
                sums.add_to(own, stream, x)

            patches.enter_context(patch.object(layer, "add_to", add_to))
        yield sums.finish


def spans_of(lengths: tuple[int, ...], way: Way) -> list[list[Span]]:
    """Returns the pieces in which a way computes prompts: halves have half of the tokens each, and
    a prompt alone is cut in two."""
    whole = [Span(prompt, 0, length) for prompt, length in enumerate(lengths)]
    if way.kind != "halves":
        return [whole]
    if len(whole) == 1:
        half = lengths[0] // 2
        return [[Span(0, 0, half)], [Span(0, half, lengths[0] - half)]]
    middle = len(whole) // 2
    return [whole[:middle], whole[middle:]]
