"""Kimi Delta Attention: linear attention in which each key channel decays by itself.

    x ─┬─ q, k, v ─ convolve, each with its last inputs ─┐
       ├─ b ─ how much to take in ───────────────────────┤
       ├─ f_a ─ f_b ─ how much of a channel to keep ─────┴─ update and read the state ─ norm ─(×)─ o
       └─ g_a ─ g_b ─ sigmoid ────────────────────────────────────────────────────────────┘

Heads are split over ranks; what f_a and g_a give is narrow, and every rank has it whole. Ling 3 has
one projection, f or g, in place of two, and Kimi K3 g in place of g_a and g_b. Sources: Kimi Linear
(arXiv 2510.26692), and transformers' `modeling_kimi_linear` and `modeling_bailing_hybrid`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from engine.layers.linear import MergedColumnParallelLinear
from engine.layers.methods.base import ColumnPart
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.states.linear_attention import DeltaAttention, DeltaGates, DeltaSizes

_PROJECTIONS = "q_proj", "k_proj", "v_proj"
_NARROW = "f_a_proj", "g_a_proj", "b_proj"
_WIDE = "f_proj", "g_proj", "b_proj"
_MIXED = "f_a_proj", "g_proj", "b_proj"


class KimiDeltaAttention(DeltaAttention):
    """Linear attention whose key channels decay each by itself; arguments as those of
    `DeltaAttention`.

    Args:
        rank: Numbers that f_a and g_a give; 0: there is one projection in place of two.
        is_mixed: With a rank, there is g in place of g_a and g_b, and the checkpoint has as many
            decays of heads as a head has numbers, of which the first ones count.
    """

    has_sigmoid: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        sizes: DeltaSizes,
        eps: float,
        shard: Shard,
        *,
        rank: int,
        is_mixed: bool = False,
        norm: RMSNorm | None = None,
        drafting: tuple[int, int] | None = None,
    ) -> None:
        decays = sizes.key_dim
        super().__init__(
            hidden_size, sizes, eps, shard, decays=decays, output="o_proj", norm=norm,
            drafting=drafting,
        )  # fmt: skip
        self.rank = rank
        keys, values, heads = self.head_parts()
        parts, narrow = (keys, keys, values), ColumnPart(0, rank, rank)
        first = self.first_value * decays
        channels = ColumnPart(first, self.value_heads * decays, sizes.value_heads * decays)
        self.in_proj = MergedColumnParallelLinear(hidden_size, parts, shard, names=_PROJECTIONS)
        self.is_mixed = is_mixed
        self.names = _NARROW if rank else _WIDE
        gates = (narrow, narrow, heads) if rank else (channels, values, heads)
        if is_mixed:
            self.names, gates = _MIXED, (narrow, values, heads)
        self.gate_proj = MergedColumnParallelLinear(hidden_size, gates, shard, names=self.names)
        self.widths = [part.count for part in gates]
        self.decay_proj: MergedColumnParallelLinear | None = None
        self.output_proj: MergedColumnParallelLinear | None = None
        if rank:
            self.decay_proj = MergedColumnParallelLinear(rank, (channels,), shard.at("f_b_proj"))
        if rank and not is_mixed:
            self.output_proj = MergedColumnParallelLinear(rank, (values,), shard.at("g_b_proj"))

    def project(self, x: Tensor) -> tuple[Tensor, DeltaGates]:
        decays, outputs, rates = self.gate_proj(x).split(self.widths, dim=1)
        if self.decay_proj is not None:
            decays = self.decay_proj(decays)
        if self.output_proj is not None:
            outputs = self.output_proj(outputs)
        return self.in_proj(x), DeltaGates(rates, decays, outputs)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors."""
        for layer, names in (
            (self.in_proj, _PROJECTIONS),
            (self.gate_proj, self.names),
            (self.decay_proj, ("f_b_proj",)),
            (self.output_proj, ("g_b_proj",)),
        ):
            if layer is not None:
                yield from layer.checkpoint_weights(*(f"{prefix}.{name}" for name in names))
        heads, channels = self.sizes.value_heads, self.sizes.key_dim
        shape: tuple[int, ...] = (channels,) if self.is_mixed else (heads,)
        target: Tensor = self.a_log
        place = 0
        if self.rank and not self.is_mixed:
            shape, target, place = (1, 1, heads, 1), self.a_log.view(1, 1, -1, 1), 2
        yield CheckpointWeight(f"{prefix}.A_log", target, shape, place, self.first_value)
        shape, first = (heads * channels,), self.first_value * channels
        yield CheckpointWeight(f"{prefix}.dt_bias", self.dt_bias, shape, 0, first)
        yield from self.own_weights(prefix, "o_norm", is_apart=True)
