"""Linear layers, split over ranks.

    ColumnParallel   each rank computes some of the outputs; input whole, output split
    RowParallel      each rank has some of the inputs; input split, output summed over ranks

so a column layer followed by a row layer needs one all-reduce. `MergedColumnParallelLinear` and
`QKVParallelLinear` are several column layers of the same input, computed as one product.

Column layers may compute few rows by kernels of our own (`Shard.narrow_rows`), and gate·up many
rows together with the activation (`Shard.gated_rows`). With many rows, and one rank, a row layer
can add to the residual stream in the product itself (`Shard.residual_rows`): the norm that follows
reads and writes half as much. In deterministic mode all products are those of
`ops.invariant_linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.shard import CheckpointWeight, Shard
from kv_transfer.layout import HeadRange
from tandem_kernels import gated_shapes, narrow_shapes, ops

Product = Callable[..., Tensor]
"""x [T, in], weight [out, in], bias [out] -> [T, out]."""


def product(shard: Shard) -> Product:
    return ops.invariant_linear if shard.deterministic else F.linear


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Rows [start, start + count) of a checkpoint tensor that has `total` rows."""

    start: int
    count: int
    total: int


class MergedColumnParallelLinear(nn.Module):
    """[T, in] -> [T, sum of the parts' counts]: one product for several checkpoint tensors.

    Args:
        parts: In the order of the outputs.
        bias: All parts have one.
    """

    bias: nn.Parameter | None

    def __init__(
        self, input_size: int, parts: tuple[ColumnPart, ...], shard: Shard, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.parts = parts
        self.sizes = [part.count for part in parts]
        self.weight = shard.parameter(sum(self.sizes), input_size)
        self.bias = shard.parameter(sum(self.sizes)) if bias else None
        self.narrow_rows = shard.narrow_rows
        self.product = product(shard)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= self.narrow_rows and narrow_shapes.takes(x, self.weight):
            return ops.narrow_linear(x, self.weight, self.bias)
        return self.product(x, self.weight, self.bias)

    def checkpoint_weights(self, *prefixes: str) -> Iterator[CheckpointWeight]:
        """`prefixes`: the checkpoint's name of each part, like "model.layers.0.mlp.up_proj"."""
        for parameter, suffix in ((self.weight, ".weight"), (self.bias, ".bias")):
            if parameter is None:
                continue
            for prefix, part, rows in zip(
                prefixes, self.parts, torch.split(parameter, self.sizes), strict=True
            ):
                shape = (part.total, *parameter.shape[1:])
                yield CheckpointWeight(prefix + suffix, rows, shape, 0, part.start)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """[T, in] -> [T, out / ranks]."""

    def __init__(
        self, input_size: int, output_size: int, shard: Shard, *, bias: bool = False
    ) -> None:
        part = ColumnPart(*shard.part(output_size), output_size)
        super().__init__(input_size, (part,), shard, bias=bias)


class GateUpParallelLinear(MergedColumnParallelLinear):
    """[T, hidden] -> [T, I / ranks]: silu(gate) * up."""

    def __init__(self, hidden_size: int, intermediate_size: int, shard: Shard) -> None:
        part = ColumnPart(*shard.part(intermediate_size), intermediate_size)
        super().__init__(hidden_size, (part, part), shard)
        self.gated_rows = shard.gated_rows

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= self.narrow_rows and narrow_shapes.takes(x, self.weight):
            return ops.gate_up_silu(x, self.weight)
        if 0 < self.gated_rows <= len(x) and gated_shapes.takes(x, self.weight):
            return ops.gated_linear(x, self.weight)
        return ops.silu_and_mul(self.product(x, self.weight))


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


class RowParallelLinear(nn.Module):
    """[T, in / ranks] -> [T, out], the sum over ranks."""

    def __init__(self, input_size: int, output_size: int, shard: Shard) -> None:
        super().__init__()
        self.group = shard.group
        self.start, count = shard.part(input_size)
        self.shape = (output_size, input_size)
        self.weight = shard.parameter(output_size, count)
        self.deterministic = shard.deterministic
        self.residual_rows = shard.residual_rows
        self.product = product(shard)

    def forward(self, x: Tensor) -> Tensor:
        local = self.product(x, self.weight)
        return self._sum_in_order(local) if self.deterministic else self.group.all_reduce(local)

    def adds_to(self, residual: Tensor) -> bool:
        """Whether `add` is the better way."""
        return 0 < self.residual_rows <= len(residual)

    def add(self, x: Tensor, residual: Tensor) -> None:
        """[T, in] into `residual` [T, out]. For one rank only."""
        residual.addmm_(x, self.weight.t())

    def _sum_in_order(self, local: Tensor) -> Tensor:
        """Over ranks. Libraries change their way, and with it the order, with the size."""
        gathered = self.group.all_gather(local)
        first, *others = torch.split(gathered, self.shape[0], dim=-1)
        for part in others:
            first = first + part
        return first.contiguous()

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield CheckpointWeight(prefix + ".weight", self.weight, self.shape, 1, self.start)
