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

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.base import ColumnPart, LinearPart
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.states.fused_conv import weight_to_convolve
from engine.layers.states.state_pages import StateInputs, views_of_pages
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import KeptInputs, StateMetadata

DeltaForm = Literal["by_key_head", "split", "apart"]
"""Says how a checkpoint has the projections: two tensors, with all that belongs to a key head
together; b, a, z and the rest in tensors of their own, each in the order of heads; or each
projection, and each convolution, in one of its own."""
_APART = "q_proj", "k_proj", "v_proj", "g_proj"
CONVOLUTIONS = "q_conv1d", "k_conv1d", "v_conv1d"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """The sizes of linear attention, over all ranks.

    Attributes:
        kernel: Inputs that each channel is convolved over, its own included.
        rate_scale, decay_floor: See `ops.gated_delta_rule`.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    rate_scale: float = 1.0
    decay_floor: float = 0.0


class DeltaGates(NamedTuple):
    """Holds what tokens have beside queries, keys and values: `rates` and `decays` as `gates` and
    `decays` of `ops.gated_delta_rule`, and `output` [T, Hv V], the gate of what is read."""

    rates: Tensor
    decays: Tensor | None
    output: Tensor


class DeltaAttention(nn.Module):
    """Adds linear attention to the residual stream. Kinds differ in what gates it.

    Args:
        eps: Of the norm of what is read.
        decays: Gates of a head that say how much of its state stays.
        output: The checkpoint's name of the projection behind it.
        norm: Of what is added; None: none.
        drafting: Rows, and tokens of a decode at most, in an engine that drafts.
    """

    has_sigmoid: ClassVar[bool] = False
    """Says that what is read is multiplied by the sigmoid of its gate, not its SiLU."""

    def __init__(
        self,
        hidden_size: int,
        sizes: DeltaSizes,
        eps: float,
        shard: Shard,
        *,
        decays: int = 1,
        output: str = "out_proj",
        norm: RMSNorm | None = None,
        drafting: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.eps = eps
        self.norm = norm
        self.output = output
        self.fixed_order = shard.gemms.deterministic
        self.first_key, self.key_heads = shard.part(sizes.key_heads)
        self.first_value, self.value_heads = shard.part(sizes.value_heads)
        self.keys = self.key_heads * sizes.key_dim
        self.values = self.value_heads * sizes.value_dim
        self.channels = 2 * self.keys + self.values
        self.conv_weight = shard.parameter(self.channels, sizes.kernel)
        self.a_log = shard.parameter(self.value_heads, dtype=torch.float32)
        self.dt_bias = shard.parameter(self.value_heads * decays, dtype=torch.float32)
        self.norm_weight = shard.parameter(sizes.value_dim)
        self.o_proj = RowParallelLinear(
            sizes.value_heads * sizes.value_dim, hidden_size, shard.at(output)
        )
        self.kept: KeptInputs | None = None
        if drafting is not None:
            gates = (1 + decays) * self.value_heads
            self.kept = KeptInputs.allocate(*drafting, self.channels, gates, self.conv_weight)

    @abstractmethod
    def project(self, x: Tensor) -> tuple[Tensor, DeltaGates]:
        """Returns queries, keys and values of the normed `x` [T, H], [T, channels], not yet
        convolved, and its gates."""

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: Tensor, inputs: StateInputs
    ) -> None:
        """Attends for the normed `x`: [T, H]; `kv_cache`: [N, bytes of a page] uint8."""
        metadata, kept = inputs.metadata, self.kept
        states, last_inputs = self.views(kv_cache, x.dtype)
        mixed, gates = self.convolved(x, last_inputs, metadata)
        read = ops.gated_delta_rule(
            mixed,
            gates.rates,
            self.a_log,
            self.dt_bias,
            states,
            metadata,
            self.fixed_order,
            None if kept is None else kept.gates,
            decays=gates.decays,
            rate_scale=self.sizes.rate_scale,
            decay_floor=self.sizes.decay_floor,
        )
        normed = ops.gated_rms_norm(
            read, gates.output, self.norm_weight, self.eps, self.has_sigmoid
        )
        self.o_proj.add_to(stream, normed, self.norm)

    def convolved(
        self, x: Tensor, last_inputs: Tensor, metadata: StateMetadata
    ) -> tuple[Tensor, DeltaGates]:
        """Returns what `project` does of `x` [T, H], convolved with `last_inputs`, which `views`
        gives: [T, channels], and rows of pending tokens, and gates."""
        mixed, gates = self.project(x)
        kept = None if self.kept is None else self.kept.convolved
        return ops.causal_conv(mixed, self.conv_weight, last_inputs, metadata, kept=kept), gates

    def views(self, kv_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the states [N, Hv, K, V] float32 and the last inputs [N, channels, kernel - 1] in
        the pages, which lie as `engine.models.specs.linear.DeltaSpec.planes` says.
        """
        sizes = self.sizes
        state = self.value_heads, sizes.key_dim, sizes.value_dim
        return views_of_pages(kv_cache, dtype, state, (self.channels, sizes.kernel - 1))

    def head_parts(self) -> tuple[ColumnPart, ColumnPart, ColumnPart]:
        """Returns our outputs of a projection to keys, of one to values, and of one that has a
        number for each value head."""
        sizes = self.sizes
        first, width = self.first_key * sizes.key_dim, self.first_value * sizes.value_dim
        keys = ColumnPart(first, self.keys, sizes.key_heads * sizes.key_dim)
        values = ColumnPart(width, self.values, sizes.value_heads * sizes.value_dim)
        return keys, values, ColumnPart(self.first_value, self.value_heads, sizes.value_heads)

    def own_weights(self, prefix: str, norm: str, *, is_apart: bool) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors of what all kinds have.

        Args:
            norm: The name of the norm of what is read.
            is_apart: Queries, keys and values have a convolution each.
        """
        sizes, keys, values = self.sizes, *self.head_parts()[:2]
        parts = self.channel_parts()
        if is_apart:
            convolved = [
                (name, rows, part.total, part.start)
                for name, (rows, _), part in zip(
                    CONVOLUTIONS, parts, (keys, keys, values), strict=True
                )
            ]
        else:
            total = 2 * keys.total + values.total
            convolved = [("conv1d", rows, total, start) for rows, start in parts]
        for name, rows, total, start in convolved:
            target, shape = self.conv_weight[rows].unsqueeze(1), (total, 1, sizes.kernel)
            yield CheckpointWeight(f"{prefix}.{name}.weight", target, shape, 0, start)
        yield CheckpointWeight(f"{prefix}.{norm}.weight", self.norm_weight, (sizes.value_dim,))
        yield from self.o_proj.checkpoint_weights(f"{prefix}.{self.output}")

    def channel_parts(self) -> list[tuple[slice, int]]:
        """Returns our channels of q, k and v, and where they begin among those of all ranks."""
        keys, values, _ = self.head_parts()
        return [
            (slice(0, self.keys), keys.start),
            (slice(self.keys, 2 * self.keys), keys.total + keys.start),
            (slice(2 * self.keys, self.channels), 2 * keys.total + values.start),
        ]


class GatedDeltaNet(DeltaAttention):
    """Linear attention whose heads decay as a whole; arguments as those of `DeltaAttention`."""

    def __init__(
        self,
        hidden_size: int,
        sizes: DeltaSizes,
        eps: float,
        shard: Shard,
        *,
        form: DeltaForm = "by_key_head",
        norm: RMSNorm | None = None,
        drafting: tuple[int, int] | None = None,
    ) -> None:
        output = "o_proj" if form == "apart" else "out_proj"
        super().__init__(
            hidden_size, sizes, eps, shard, output=output, norm=norm, drafting=drafting
        )
        self.form, self.gemms = form, shard.gemms
        outputs, gates = self._parts()
        self.names: dict[DeltaForm, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "by_key_head": (("in_proj_qkvz",), ("in_proj_ba",)),
            "split": (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
            "apart": (_APART, ("b_proj", "a_proj")),
        }
        names, gate_names = self.names[form]
        self.in_proj = MergedColumnParallelLinear(hidden_size, outputs, shard, names=names)
        self.gate_proj = MergedColumnParallelLinear(hidden_size, gates, shard, names=gate_names)

    def project(self, x: Tensor) -> tuple[Tensor, DeltaGates]:
        projected = self.in_proj(x)
        output = projected[:, self.channels :]
        return projected[:, : self.channels], DeltaGates(self.gate_proj(x), None, output)

    def convolved(
        self, x: Tensor, last_inputs: Tensor, metadata: StateMetadata
    ) -> tuple[Tensor, DeltaGates]:
        """Projects and convolves few rows `x` [T, H] in one launch."""
        taps = self.conv_weight
        weight = weight_to_convolve(self.in_proj, x, taps, metadata, self.gemms)
        if weight is None:
            return super().convolved(x, last_inputs, metadata)
        gates = self.gate_proj(x)
        projected = ops.few_row_conv(x, weight, taps, last_inputs, metadata)
        output = projected[:, self.channels :]
        return projected[:, : self.channels], DeltaGates(gates, None, output)

    def _parts(self) -> tuple[tuple[ColumnPart, ...], tuple[ColumnPart, ...]]:
        """Returns the outputs of both projections: q, k, v, z, and b, a."""
        sizes = self.sizes
        start, count = self.first_key, self.key_heads
        repeats = sizes.value_heads // sizes.key_heads
        if self.form == "by_key_head":
            widths = (sizes.key_dim, sizes.key_dim, *[repeats * sizes.value_dim] * 2)
            return (_by_key_head(start, count, sizes.key_heads, widths),), (
                _by_key_head(start, count, sizes.key_heads, (repeats, repeats)),
            )
        keys, values, gate = self.head_parts()
        return (keys, keys, values, values), (gate, gate)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors."""
        names, gates = self.names[self.form]
        if self.form == "split":
            yield from self._split_weights(prefix)
        else:
            yield from self.in_proj.checkpoint_weights(*(f"{prefix}.{name}" for name in names))
        yield from self.gate_proj.checkpoint_weights(*(f"{prefix}.{name}" for name in gates))
        heads = (self.sizes.value_heads,)
        for name, target in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            yield CheckpointWeight(f"{prefix}.{name}", target, heads, 0, self.first_value)
        is_apart = self.form == "apart"
        yield from self.own_weights(prefix, "o_norm" if is_apart else "norm", is_apart=is_apart)

    def _split_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists q, k and v, one tensor of the checkpoint, and z, another."""
        inputs, (keys, values, _) = self.in_proj.input_size, self.head_parts()
        shape = (2 * keys.total + values.total, inputs)
        parts = [
            LinearPart(f"{prefix}.in_proj_qkv", shape, 0, start, rows)
            for rows, start in self.channel_parts()
        ]
        rows, shape = slice(self.channels, self.channels + self.values), (values.total, inputs)
        parts.append(LinearPart(f"{prefix}.in_proj_z", shape, 0, values.start, rows))
        for part in parts:
            yield from self.in_proj.method.checkpoint_weights(self.in_proj, part)


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
