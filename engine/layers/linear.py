"""Linear layers, split over ranks.

    ColumnParallel   each rank computes some of the outputs; input whole, output split
    RowParallel      each rank has some of the inputs; input split, output summed over ranks

so a column layer followed by a row layer needs one all-reduce. `MergedColumnParallelLinear` and
`QKVParallelLinear` are several column layers of the same input, computed as one GEMM. How a layer
computes, and which tensors it holds, is its method's matter (`engine.layers.methods`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.layers.methods.base import LinearLayer, LinearPart
from engine.layers.methods.choice import column_method, gate_up_method, row_method
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from kv_transfer.layout import HeadRange


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Outputs [start, start + count) of a projection that has `total`."""

    start: int
    count: int
    total: int


class MergedColumnParallelLinear(LinearLayer):
    """[T, in] -> [T, sum of the parts' counts]: one GEMM for several projections.

    Args:
        parts: In the order of the outputs.
        bias: All parts have one.
    """

    choose_method = staticmethod(column_method)

    def __init__(
        self, input_size: int, parts: tuple[ColumnPart, ...], shard: Shard, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.parts = parts
        self.input_size = input_size
        self.method = self.choose_method(shard.gemms)
        self.method.create(self, sum(part.count for part in parts), input_size, bias, shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)

    def checkpoint_weights(self, *prefixes: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `prefixes` holds its name of each part, like
        "model.layers.0.mlp.up_proj". One name: its tensor holds all parts behind each other.
        """
        is_fused = len(prefixes) == 1
        fused_size = sum(part.total for part in self.parts)
        names = prefixes * len(self.parts) if is_fused else prefixes
        row = before = 0
        for prefix, part in zip(names, self.parts, strict=True):
            shape = (fused_size if is_fused else part.total, self.input_size)
            start = part.start + (before if is_fused else 0)
            rows = slice(row, row + part.count)
            yield from self.method.checkpoint_weights(
                self, LinearPart(prefix, shape, 0, start, rows)
            )
            row, before = row + part.count, before + part.total


class GateUpParallelLinear(MergedColumnParallelLinear):
    """[T, hidden] -> [T, I / ranks]: silu(gate) * up."""

    choose_method = staticmethod(gate_up_method)

    def __init__(self, hidden_size: int, intermediate_size: int, shard: Shard) -> None:
        part = ColumnPart(*shard.part(intermediate_size), intermediate_size)
        super().__init__(hidden_size, (part, part), shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.gate_up(self, x)


class QKVParallelLinear(MergedColumnParallelLinear):
    """[T, hidden] -> queries, keys and values of this rank's heads.

    Args:
        kv_heads: Which key/value heads this rank stores. Ranks beyond their number share one.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        kv_heads: HeadRange,
        shard: Shard,
        *,
        bias: bool,
    ) -> None:
        start, count = shard.part(num_heads)
        q = ColumnPart(start * head_dim, count * head_dim, num_heads * head_dim)
        kv = ColumnPart(
            kv_heads.start * head_dim, kv_heads.count * head_dim, num_kv_heads * head_dim
        )
        super().__init__(hidden_size, (q, kv, kv), shard, bias=bias)


class RowParallelLinear(LinearLayer):
    """[T, in / ranks] -> [T, out], the sum over ranks."""

    choose_method = staticmethod(row_method)

    def __init__(self, input_size: int, output_size: int, shard: Shard) -> None:
        super().__init__()
        self.group = shard.tp
        self.start, count = shard.part(input_size)
        self.shape = (output_size, input_size)
        self.method = self.choose_method(shard.gemms)
        self.method.create(self, output_size, count, False, shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.reduce(self.method.apply(self, x), self.group)

    def add_to(self, stream: ResidualStream, x: Tensor) -> None:
        """Adds the output for [T, in / ranks] to the stream, in the GEMM where that is faster."""
        if not self.method.add_to(self, x, stream.sum):
            stream.add(self(x))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.method.checkpoint_weights(
            self, LinearPart(prefix, self.shape, 1, self.start)
        )
