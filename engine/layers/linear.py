"""Linear layers, split over ranks.

    ColumnParallel   each rank computes some of the outputs; input whole, output split
    RowParallel      each rank has some of the inputs; input split, output summed over ranks

so a column layer followed by a row layer needs one all-reduce. `MergedColumnParallelLinear` and
`QKVParallelLinear` are several column layers of the same input, computed as one GEMM. How a layer
computes, and which tensors it holds, is its method's matter (`engine.layers.methods`). Source of
the split: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from engine.head_sizes import HeadSizes
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import (
    ColumnPart,
    HeadPlaces,
    LinearLayer,
    LinearMethod,
    LinearPart,
    LinearShare,
)
from engine.layers.methods.choice import column_method, gate_up_method, qkv_method, row_method
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import PartialSum, RowForm, Rows, UnnormedRows, UnnormedSum, UnscaledProduct
from engine.layers.shard import CheckpointWeight, Shard, nothing_of, unread
from kv_transfer.planes import NO_HEADS, HeadRange
from tandem_kernels import ops
from tandem_kernels.elementwise.gate_form import GateForm as Activation

GateForm = Literal["none", "paired", "apart", "per_head"]
"""Says where a checkpoint has the gates of query heads: behind each of them, or as a projection of
their own, with a number for each that a head attends to, or one for each head."""


class MergedColumnParallelLinear(LinearLayer):
    """[T, in] -> [T, sum of the parts' counts]: one GEMM for several projections.

    Args:
        parts: In the order of the outputs.
        shard: Of the layer, or with `names` of the module around it.
        bias: All parts have one.
        names: Of the parts' modules inside that one, as far as quantisation tells them apart.
    """

    method_for = staticmethod(column_method)

    def __init__(
        self,
        input_size: int,
        parts: tuple[ColumnPart, ...],
        shard: Shard,
        *,
        bias: bool = False,
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.parts = parts
        self.input_size = input_size
        self.scheme = shard.scheme(*names)
        self.share = LinearShare(shard.prefix, parts, (0, input_size), input_size)
        self.method = self.choose_method(shard.gemms)
        self.method.create(self, sum(part.count for part in parts), input_size, bias, shard)

    def choose_method(self, policy: GemmPolicy) -> LinearMethod:
        """Returns how this layer is computed under a policy."""
        return self.method_for(policy, self.scheme, self.share)

    @property
    def input_form(self) -> RowForm | None:
        """Returns how inputs are best given; see `LinearMethod`."""
        return self.method.input_form

    def forward(self, x: Rows) -> Tensor:
        return self.method.apply_rows(self, x)

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
                self, LinearPart(prefix, shape, 0, start, rows, part.order)
            )
            row, before = row + part.count, before + part.total


class ReplicatedLinear(MergedColumnParallelLinear):
    """[T, in] -> [T, out], whole on every rank."""

    def __init__(
        self, input_size: int, output_size: int, shard: Shard, *, bias: bool = False
    ) -> None:
        super().__init__(input_size, (ColumnPart(0, output_size, output_size),), shard, bias=bias)


class GateUpParallelLinear(MergedColumnParallelLinear):
    """[T, hidden] -> [T, I / ranks]: activation(gate) * up, where the activation is SiLU, or GELU
    by its tanh formula. Source: Shazeer, GLU Variants (arXiv 2002.05202).

    Args:
        gate: The activation, if it has a limit.
        scales: Of what gate and up give, in front of SiLU; None: they have none.
    """

    method_for = staticmethod(gate_up_method)

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        shard: Shard,
        *,
        is_gelu: bool = False,
        gate: Activation | None = None,
        scales: tuple[float, float] | None = None,
    ) -> None:
        part = ColumnPart(*shard.part(intermediate_size), intermediate_size)
        super().__init__(hidden_size, (part, part), shard, names=("gate_proj", "up_proj"))
        self.is_gelu, self.gate = is_gelu, gate
        self.scales: Tensor | None = None
        if scales is not None:
            each = torch.tensor(scales, dtype=shard.dtype, device=shard.device)
            self.scales = each.repeat_interleave(part.count)

    def forward(self, x: Rows) -> Tensor:
        activated = self.activated(x, None)
        assert isinstance(activated, Tensor)
        return activated

    def activated(self, x: Rows, form: RowForm | None) -> Rows:
        """Returns the activation, [T, I / ranks], in `form`: the `input_form` of the layer that
        reads it."""
        if self.scales is not None:
            return ops.silu_and_mul(self.method.apply_rows(self, x) * self.scales)
        if self.gate is not None:
            return ops.bounded_gate_and_mul(self.method.apply_rows(self, x), self.gate)
        return self.method.gate_up_rows(self, x, form, self.is_gelu)


class QKVParallelLinear(MergedColumnParallelLinear):
    """[T, hidden] -> [T, Hq D + Hkv (D + Dv)]: queries, keys and values of this rank's heads.

    Args:
        heads: Of all ranks.
        kv_heads: Which key/value heads this rank stores. Ranks beyond their number share one. None:
            the layer has queries alone.
        head_order: [head_dim] int64 or None: element i of each query and key head is element
            `head_order[i]` of the checkpoint's.
        gates: Where the checkpoint has gates of query heads. The output then begins with those of
            all heads, [T, Hq Dv] or [T, Hq].
        gate_name: Of their projection, if they have one.
        shares_keys: Values are projected by the weights of keys.

    Attributes:
        names: Of the projections in the checkpoint, in the order of the outputs.
    """

    method_for = staticmethod(qkv_method)

    def __init__(
        self,
        hidden_size: int,
        heads: HeadSizes,
        kv_heads: HeadRange,
        shard: Shard,
        *,
        bias: bool,
        head_order: Tensor | None = None,
        gates: GateForm = "none",
        gate_name: str = "gate_proj",
        shares_keys: bool = False,
    ) -> None:
        start, count = shard.part(heads.num_heads)
        head_dim, kv = heads.head_dim, (kv_heads.start, kv_heads.count, heads.num_kv_heads)

        def part(
            first: int, held: int, total: int, width: int, order: Tensor | None = None
        ) -> ColumnPart:
            if order is not None:
                order = repeated(order, held)
            return ColumnPart(first * width, held * width, total * width, order)

        queries = part(start, count, heads.num_heads, head_dim, head_order)
        if gates == "paired":
            of_query = torch.arange(head_dim) if head_order is None else head_order
            pairs = torch.arange(count)[:, None] * (2 * head_dim)
            of_gate = pairs + head_dim + torch.arange(head_dim)
            order = torch.cat((of_gate.flatten(), (pairs + of_query).flatten()))
            queries = ColumnPart(2 * queries.start, 2 * queries.count, 2 * queries.total, order)
        keys, values = part(*kv, head_dim, head_order), part(*kv, heads.v_head_dim)
        parts: tuple[ColumnPart, ...] = (queries, keys, values)
        names: tuple[str, ...] = ("q_proj", "k_proj", "k_proj" if shares_keys else "v_proj")
        if kv_heads == NO_HEADS:
            parts, names = parts[:1], names[:1]
        if gates in ("apart", "per_head"):
            width = heads.v_head_dim if gates == "apart" else 1
            parts = (part(start, count, heads.num_heads, width), *parts)
            names = (gate_name, *names)
        super().__init__(hidden_size, parts, shard, bias=bias, names=names)
        self.names = names

    def heads(self, x: Rows | UnnormedRows, places: HeadPlaces) -> Tensor | None:
        """Returns heads that are rotated and written to the cache, [T, Hq + 2 Hkv, D], where one
        launch computes all that; else None. Not for layers with gates, nor where values are
        narrower than keys."""
        return self.method.project_heads(self, x, places)

    def cut_weights(self, prefix: str, num_ranks: int) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors where it has one for each rank of some other node with
        `num_ranks`, `prefix`.RANK, with the rank's parts of all projections behind each other."""
        sizes = [part.total // num_ranks for part in self.parts]
        shape = sum(sizes), self.input_size
        unseen, row, before = set(range(num_ranks)), 0, 0
        for part, size in zip(self.parts, sizes, strict=True):
            for rank in range(num_ranks):
                start = max(part.start, rank * size)
                count = min(part.start + part.count, (rank + 1) * size) - start
                if count <= 0:
                    continue
                own = start - part.start
                rows = slice(row + own, row + own + count)
                order = None if part.order is None else part.order[own : own + count] - own
                at = LinearPart(
                    f"{prefix}.{rank}", shape, 0, before + start - rank * size, rows, order
                )
                yield from self.method.checkpoint_weights(self, at)
                unseen.discard(rank)
            row, before = row + part.count, before + size
        for rank in sorted(unseen):
            nothing = LinearPart(f"{prefix}.{rank}", shape, 0, 0, slice(0, 1))
            yield from map(unread, self.method.checkpoint_weights(self, nothing))


def repeated(order: Tensor, num_heads: int) -> Tensor:
    """Returns the order of the elements of one head, [D], for heads behind each other: [H * D]."""
    starts = torch.arange(num_heads) * len(order)
    return (starts[:, None] + order).flatten()


class RowParallelLinear(LinearLayer):
    """[T, in / ranks] -> [T, out], the sum over ranks.

    Args:
        bias: It has one, which the first rank adds.
    """

    def __init__(
        self, input_size: int, output_size: int, shard: Shard, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.group = shard.tp
        self.shared_residual_rows = 0 if bias else shard.gemms.shared_residual_rows
        self.ignores_bias = bias and shard.tp.rank > 0
        self.start, count = shard.part(input_size)
        self.shape = (output_size, input_size)
        outputs = ColumnPart(0, output_size, output_size)
        self.scheme = shard.scheme()
        self.share = LinearShare(shard.prefix, (outputs,), (self.start, count), input_size)
        self.method = self.choose_method(shard.gemms)
        self.method.create(self, output_size, count, bias and not self.ignores_bias, shard)

    def choose_method(self, policy: GemmPolicy) -> LinearMethod:
        """Returns how this layer is computed under a policy."""
        return row_method(policy, self.scheme, self.share)

    @property
    def input_form(self) -> RowForm | None:
        """Returns how inputs are best given; see `LinearMethod`."""
        return self.method.input_form

    def forward(self, x: Rows) -> Tensor:
        return self.method.reduce(self.method.apply_rows(self, x), self.group)

    def partial(self, x: Rows) -> Tensor:
        """Returns this rank's part of the sum over ranks, [T, out]."""
        return self.method.apply_rows(self, x)

    def accumulate(self, x: Rows, out: Tensor) -> None:
        """Adds this rank's part of the sum over ranks to `out`, [T, out]."""
        self.method.accumulate(self, x, out)

    def add_to(self, stream: ResidualStream, x: Rows, norm: RMSNorm | None = None) -> None:
        """Adds the output for [T, in / ranks], or its norm, to the stream; in the GEMM where that
        is faster."""
        if norm is not None:
            stream.add(UnnormedSum(self(x), norm.form))
        elif isinstance(x, Tensor) and 0 < self.shared_residual_rows <= len(x):
            stream.sum = self.group.all_reduce(self._part_of_sum(x, stream.sum))
        elif not isinstance(x, Tensor) or not self.method.add_to(self, x, stream.sum):
            stream.add(self._waiting(x))

    def _part_of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """Returns this rank's part of the output and of `residual`, which the first rank has."""
        if self.group.rank > 0:
            return self.partial(x)
        self.accumulate(x, residual)
        return residual

    def _waiting(self, x: Rows) -> Tensor | UnscaledProduct | PartialSum:
        """Returns the output in whatever form the norm behind it can finish."""
        if self.group.size == 1:
            return self.method.unscaled(self, x)
        if self.group.fuses_norm:
            return PartialSum(self.partial(x), self.group)
        summed: Tensor = self(x)
        return summed

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.method.checkpoint_weights(
            self, LinearPart(prefix, self.shape, 1, self.start)
        )
        if self.ignores_bias:
            yield nothing_of(f"{prefix}.bias", self.shape[:1])
