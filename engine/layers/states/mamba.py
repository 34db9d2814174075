"""Mamba 2: a request keeps one state, whatever its length.

    x ─┬─ x, B, C ─ convolve with the last inputs ─┐
       ├─ dt ─ how far to move ────────────────────┴─ update and read the state ─(×)─ norm ─ o ─(+)
       └─ z ─ SiLU ───────────────────────────────────────────────────────────────┘

A block of the cache holds a request's state in a layer, and the last inputs of its convolution.
Heads are split over ranks, and so are groups of heads, which share B and C; ranks beyond their
number have the same group, and norm it together. Sources: Dao and Gu, Transformers are SSMs (arXiv
2405.21060); the block around it as in Bamba and Nemotron-H (transformers' `modeling_nemotron_h`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.base import ColumnPart
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.states.fused_conv import weight_to_convolve
from engine.layers.states.group_norm import means_over_ranks
from engine.layers.states.state_pages import StateInputs, views_of_pages
from kv_transfer.planes import heads_of_rank
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import KeptInputs, StateMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """The sizes of a layer, over all ranks.

    Attributes:
        groups: Of neighbouring heads, which share B and C, and are normed together.
        size: Of B and C.
        kernel: Inputs that each channel is convolved over, its own included.
        conv_bias: Its sums have a bias.
        is_normed: What is read is normed behind its gate.
        input_scales: Of z, x, B, C and dt, once they are projected; empty: none has one.
        output_scale: Multiplies what is read.
    """

    heads: int
    groups: int
    head_dim: int
    size: int
    kernel: int
    conv_bias: bool
    is_normed: bool = True
    input_scales: tuple[float, ...] = ()
    output_scale: float = 1.0


class MambaMixer(nn.Module):
    """Adds a layer of Mamba 2 to the residual stream.

    Args:
        eps: Of the norm of what is read.
        norm: Of what is added; None: none.
        drafting: Rows, and tokens of a decode at most, in an engine that drafts.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: MambaSizes,
        eps: float,
        shard: Shard,
        *,
        norm: RMSNorm | None = None,
        drafting: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.eps = eps
        self.norm = norm
        self.group = shard.tp
        self.gemms = shard.gemms
        self.fixed_order = shard.gemms.deterministic
        self.first_head, self.heads = shard.part(sizes.heads)
        self.groups = heads_of_rank(sizes.groups, shard.tp.rank, shard.tp.size)
        self.inner = self.heads * sizes.head_dim
        self.channels = self.inner + 2 * self.groups.count * sizes.size
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, self._parts(), shard, names=("in_proj",)
        )
        self.conv_weight = shard.parameter(self.channels, sizes.kernel)
        self.conv_bias = shard.parameter(self.channels) if sizes.conv_bias else None
        self.a_log, self.dt_bias, self.skip = (
            shard.parameter(self.heads, dtype=torch.float32) for _ in range(3)
        )
        self.norm_weight = shard.parameter(self.inner)
        if not sizes.is_normed:
            self.norm_weight.data.fill_(sizes.output_scale)
        self.input_scales: Tensor | None = None
        if sizes.input_scales:
            counts = [part.count for part in self._parts()]
            scales = torch.tensor(sizes.input_scales).repeat_interleave(
                torch.tensor(counts), output_size=sum(counts)
            )
            self.input_scales = scales.to(shard.device, shard.dtype)
        self.o_proj = RowParallelLinear(
            sizes.heads * sizes.head_dim, hidden_size, shard.at("out_proj")
        )
        self.kept: KeptInputs | None = None
        if drafting is not None:
            like = self.conv_weight
            self.kept = KeptInputs.allocate(*drafting, self.channels, self.heads, like)

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: Tensor, inputs: StateInputs
    ) -> None:
        """Mixes the normed `x`: [T, H]; `kv_cache`: [N, bytes of a page] uint8."""
        metadata, kept = inputs.metadata, self.kept
        states, last_inputs = self.views(kv_cache, x.dtype)
        gate, mixed, steps = self._convolved(x, last_inputs, metadata)
        read = ops.mamba_scan(
            mixed,
            steps,
            self.a_log,
            self.dt_bias,
            self.skip,
            states,
            metadata,
            self.fixed_order,
            None if kept is None else kept.gates,
        )
        self.o_proj.add_to(stream, self._normed(read.flatten(1), gate), self.norm)

    def _convolved(
        self, x: Tensor, last_inputs: Tensor, metadata: StateMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gate, what is convolved, and the steps of `x` [T, H]; few rows are projected
        and convolved in one launch."""
        taps, bias, first = self.conv_weight, self.conv_bias, self.inner
        weight, end = None, first + self.channels
        if self.input_scales is None:
            weight = weight_to_convolve(self.in_proj, x, taps, metadata, self.gemms)
        if weight is not None:
            given = ops.few_row_conv(x, weight, taps, last_inputs, metadata, first, bias)
            return given[:, :first], given[:, first:end], given[:, end:]
        projected = self.in_proj(x)
        if self.input_scales is not None:
            projected = projected * self.input_scales
        kept = None if self.kept is None else self.kept.convolved
        mixed = projected[:, first:end]
        mixed = ops.causal_conv(mixed, taps, last_inputs, metadata, bias, kept=kept)
        return projected[:, :first], mixed, projected[:, end:]

    def _normed(self, read: Tensor, gate: Tensor) -> Tensor:
        """Gates and norms what was read, [T, heads * head_dim]."""
        groups = self.groups
        if not self.sizes.is_normed:
            # A mean square of 1 leaves everything as it is.
            unit = torch.full((len(read), 1), 1.0 - self.eps, device=read.device)
            return ops.gated_group_norm(read, gate, self.norm_weight, self.eps, 1, unit)
        means = means_over_ranks(read, gate, groups, self.sizes.groups, self.group)
        normed = ops.gated_group_norm(read, gate, self.norm_weight, self.eps, groups.count, means)
        scale = self.sizes.output_scale
        return normed if scale == 1.0 else normed * scale

    def views(self, kv_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the states [N, heads, size, head_dim] float32 and the last inputs [N, channels,
        kernel - 1] in the pages, which lie as `engine.models.specs.mamba.MambaSpec.planes` says.
        """
        sizes = self.sizes
        state = self.heads, sizes.size, sizes.head_dim
        return views_of_pages(kv_cache, dtype, state, (self.channels, sizes.kernel - 1))

    def _parts(self) -> tuple[ColumnPart, ...]:
        """Returns the outputs of the projection: z, x, B, C, dt."""
        sizes = self.sizes
        inner, step = (
            ColumnPart(self.first_head * width, self.heads * width, sizes.heads * width)
            for width in (sizes.head_dim, 1)
        )
        groups = ColumnPart(
            self.groups.start * sizes.size,
            self.groups.count * sizes.size,
            sizes.groups * sizes.size,
        )
        return inner, inner, groups, groups, step

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors."""
        sizes = self.sizes
        yield from self.in_proj.checkpoint_weights(f"{prefix}.in_proj")
        _, *convolved, _ = self._parts()
        total = sum(part.total for part in convolved)
        row = before = 0
        for part in convolved:
            rows, start = slice(row, row + part.count), before + part.start
            target = self.conv_weight[rows].unsqueeze(1)
            shape = (total, 1, sizes.kernel)
            yield CheckpointWeight(f"{prefix}.conv1d.weight", target, shape, 0, start)
            if self.conv_bias is not None:
                bias = self.conv_bias[rows]
                yield CheckpointWeight(f"{prefix}.conv1d.bias", bias, (total,), 0, start)
            row, before = row + part.count, before + part.total
        for name, target in (("A_log", self.a_log), ("dt_bias", self.dt_bias), ("D", self.skip)):
            of_heads = (sizes.heads,)
            yield CheckpointWeight(f"{prefix}.{name}", target, of_heads, 0, self.first_head)
        whole, first = sizes.heads * sizes.head_dim, self.first_head * sizes.head_dim
        if sizes.is_normed:
            yield CheckpointWeight(f"{prefix}.norm.weight", self.norm_weight, (whole,), 0, first)
        yield from self.o_proj.checkpoint_weights(f"{prefix}.out_proj")
