"""Linear attention by the gated delta rule: a request keeps one state, whatever its length.

    x ─┬─ q, k, v ─ convolve with the last inputs ─┐
       ├─ b, a ─ how much to take in, to keep ─────┴─ update and read the state ─ norm ─(×)─ o ─(+)
       └─ z ─ SiLU ──────────────────────────────────────────────────────────────────────┘

A block of the cache holds a request's state in a layer, and the last inputs of its convolution.
Key heads, with the value heads that share them, are split over ranks, and so is all of that.
Sources: Yang et al., Gated Delta Networks (arXiv 2412.06464); the block around it as in Qwen3-Next
(transformers' `modeling_qwen3_next`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.base import ColumnPart, LinearPart
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.state_pages import StateInputs, views_of_pages
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import KeptInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """The sizes of linear attention, over all ranks.

    Attributes:
        kernel: Inputs that each channel is convolved over, its own included.
        is_split: The checkpoint has b, a, z and the rest in tensors of their own, each in the order
            of heads; else two tensors, by key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_split: bool


class GatedDeltaNet(nn.Module):
    """Adds linear attention to the residual stream.

    Args:
        eps: Of the norm of what is read.
        norm: Of what is added; None: none.
        drafting: Rows, and tokens of a decode at most, in an engine that drafts.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: DeltaSizes,
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
        self.fixed_order = shard.gemms.deterministic
        self.first_key, self.key_heads = shard.part(sizes.key_heads)
        self.first_value, self.value_heads = shard.part(sizes.value_heads)
        self.keys = self.key_heads * sizes.key_dim
        self.values = self.value_heads * sizes.value_dim
        self.channels = 2 * self.keys + self.values
        outputs, gates = self._parts()
        names = ("in_proj_qkv", "in_proj_z") if sizes.is_split else ("in_proj_qkvz",)
        self.in_proj = MergedColumnParallelLinear(hidden_size, outputs, shard, names=names)
        names = ("in_proj_b", "in_proj_a") if sizes.is_split else ("in_proj_ba",)
        self.gate_proj = MergedColumnParallelLinear(hidden_size, gates, shard, names=names)
        self.conv_weight = shard.parameter(self.channels, sizes.kernel)
        self.a_log = shard.parameter(self.value_heads, dtype=torch.float32)
        self.dt_bias = shard.parameter(self.value_heads, dtype=torch.float32)
        self.norm_weight = shard.parameter(sizes.value_dim)
        self.o_proj = RowParallelLinear(
            sizes.value_heads * sizes.value_dim, hidden_size, shard.at("out_proj")
        )
        self.kept: KeptInputs | None = None
        if drafting is not None:
            gated = 2 * self.value_heads
            self.kept = KeptInputs.allocate(*drafting, self.channels, gated, self.conv_weight)

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: Tensor, inputs: StateInputs
    ) -> None:
        """Attends for the normed `x`: [T, H]; `kv_cache`: [N, bytes of a page] uint8."""
        metadata, kept = inputs.metadata, self.kept
        states, last_inputs = self.views(kv_cache, x.dtype)
        projected = self.in_proj(x)
        mixed = ops.causal_conv(
            projected[:, : self.channels],
            self.conv_weight,
            last_inputs,
            metadata,
            kept=None if kept is None else kept.convolved,
        )
        read = ops.gated_delta_rule(
            mixed,
            self.gate_proj(x),
            self.a_log,
            self.dt_bias,
            states,
            metadata,
            self.fixed_order,
            None if kept is None else kept.gates,
        )
        normed = ops.gated_rms_norm(read, projected[:, self.channels :], self.norm_weight, self.eps)
        self.o_proj.add_to(stream, normed, self.norm)

    def views(self, kv_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the states [N, Hv, K, V] float32 and the last inputs [N, channels, kernel - 1] in
        the pages, which lie as `engine.models.specs.linear.LinearSpec.planes` says.
        """
        sizes = self.sizes
        state = self.value_heads, sizes.key_dim, sizes.value_dim
        return views_of_pages(kv_cache, dtype, state, (self.channels, sizes.kernel - 1))

    def _parts(self) -> tuple[tuple[ColumnPart, ...], tuple[ColumnPart, ...]]:
        """Returns the outputs of both projections: q, k, v, z, and b, a."""
        sizes = self.sizes
        start, count = self.first_key, self.key_heads
        repeats = sizes.value_heads // sizes.key_heads
        if not sizes.is_split:
            widths = (sizes.key_dim, sizes.key_dim, *[repeats * sizes.value_dim] * 2)
            return (_by_key_head(start, count, sizes.key_heads, widths),), (
                _by_key_head(start, count, sizes.key_heads, (repeats, repeats)),
            )
        keys = ColumnPart(start * sizes.key_dim, self.keys, sizes.key_heads * sizes.key_dim)
        width = sizes.value_dim
        values = ColumnPart(self.first_value * width, self.values, sizes.value_heads * width)
        gate = ColumnPart(self.first_value, self.value_heads, sizes.value_heads)
        return (keys, keys, values, values), (gate, gate)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors."""
        sizes = self.sizes
        if sizes.is_split:
            yield from self._split_weights(prefix)
            yield from self.gate_proj.checkpoint_weights(
                f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"
            )
        else:
            yield from self.in_proj.checkpoint_weights(f"{prefix}.in_proj_qkvz")
            yield from self.gate_proj.checkpoint_weights(f"{prefix}.in_proj_ba")
        total = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
        for rows, start in self._channel_parts():
            target = self.conv_weight[rows].unsqueeze(1)
            shape = (total, 1, sizes.kernel)
            yield CheckpointWeight(f"{prefix}.conv1d.weight", target, shape, 0, start)
        for name, target in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            yield CheckpointWeight(
                f"{prefix}.{name}", target, (sizes.value_heads,), 0, self.first_value
            )
        yield CheckpointWeight(f"{prefix}.norm.weight", self.norm_weight, (sizes.value_dim,))
        yield from self.o_proj.checkpoint_weights(f"{prefix}.out_proj")

    def _split_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists q, k and v, one tensor of the checkpoint, and z, another."""
        sizes, inputs = self.sizes, self.in_proj.input_size
        values = sizes.value_heads * sizes.value_dim
        shape = (2 * sizes.key_heads * sizes.key_dim + values, inputs)
        parts = [
            LinearPart(f"{prefix}.in_proj_qkv", shape, 0, start, rows)
            for rows, start in self._channel_parts()
        ]
        rows = slice(self.channels, self.channels + self.values)
        first = self.first_value * sizes.value_dim
        parts.append(LinearPart(f"{prefix}.in_proj_z", (values, inputs), 0, first, rows))
        for part in parts:
            yield from self.in_proj.method.checkpoint_weights(self.in_proj, part)

    def _channel_parts(self) -> list[tuple[slice, int]]:
        """Returns our channels of q, k and v, and where they begin among those of all ranks."""
        sizes = self.sizes
        all_keys = sizes.key_heads * sizes.key_dim
        first_key = self.first_key * sizes.key_dim
        first_value = self.first_value * sizes.value_dim
        return [
            (slice(0, self.keys), first_key),
            (slice(self.keys, 2 * self.keys), all_keys + first_key),
            (slice(2 * self.keys, self.channels), 2 * all_keys + first_value),
        ]


def _by_key_head(start: int, count: int, total: int, widths: tuple[int, ...]) -> ColumnPart:
    """Returns the part of a tensor that has, for each key head, `widths` outputs of several kinds
    behind each other; ours has all heads of the first kind, then of the second."""
    whole = sum(widths)
    kinds, before = [], 0
    for width in widths:
        kinds.append(
            (torch.arange(count)[:, None] * whole + before + torch.arange(width)).flatten()
        )
        before += width
    return ColumnPart(start * whole, count * whole, total * whole, torch.cat(kinds))
