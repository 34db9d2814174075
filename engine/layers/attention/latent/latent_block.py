"""Multi-head latent attention: what the cache keeps is one vector a token, shared by all heads.

    x ─ q ─────────────── q_nope ─ × W_UK ─▶ q_latent ─┐
    │    └─────────────── q_rope ─ rotate ─────────────┤ attend ─ × W_UV ─ o ─(+)
    └─ kv_a ─ latent ─ norm ─┬─ cache, [L + R] a token ┘
              key ─ rotate ──┘

This is the absorbed form: instead of expanding the cache into keys and values, the two halves of
`kv_b_proj` are applied to the query and to the result. Long chunks take the other form
(`latent_backend` says which, `latent_forms` computes both). Heads are split over ranks; the latent
is computed and cached by all. Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.attention.index.indexer import Indexer, IndexerSizes
from engine.layers.attention.latent.latent_forms import LatentForms
from engine.layers.attention.latent.latent_input import LatentInputProjection
from engine.layers.attention.layer import AttentionInputs
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, repeated
from engine.layers.methods.base import ColumnPart, LinearPart
from engine.layers.methods.formats.weight_format import matrix_weight
from engine.layers.methods.registry import format_of
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import RowForm, Rows
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.side_stream import NO_SIDE, NoSide, SideStream, fork, side_stream
from tandem_kernels import ops
from tandem_kernels.attention.index_pages import IndexedLatents
from tandem_kernels.attention.kv_scales import KVScales

LATENT_NORM_EPS = 1e-6
"""transformers takes it for the norms of latents, whatever config.json says of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """The sizes of latent attention.

    Attributes:
        q_rank: Of the queries' latent; 0: queries are projected directly.
        kv_rank: Of the cached latent, L.
        nope, rope, value: Of a head: what does not rotate, what does (R), and its result.
        scale: Of the scores.
        rope_order: See `engine.rope.Rotary.head_order`, for the `rope` elements.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    scale: float
    rope_order: tuple[int, ...] | None = None


class LatentAttentionBlock(nn.Module):
    """Adds latent attention to the residual stream.

    Args:
        num_heads: Of all ranks.
        norm: Of what is added; None: none.
        kv_scales: See `AttentionSpec`; one for latents and keys.
        indexer: Chooses what is attended; None: all is, or what the layer before attends to.
        gates: Numbers that each head has of gates, whose sigmoids multiply what it attends to
            (`g_proj`): one for all, or one for each; 0: there are none.
    """

    q_a_norm: RMSNorm | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentSizes,
        shard: Shard,
        *,
        norm: RMSNorm | None = None,
        kv_scales: KVScales | None = None,
        indexer: IndexerSizes | None = None,
        gates: int = 0,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm = norm
        self.first_head, self.num_heads = shard.part(num_heads)
        self.total_heads = num_heads
        q_order, key_order = _orders(sizes)
        head = sizes.nope + sizes.rope
        queries = ColumnPart(
            self.first_head * head,
            self.num_heads * head,
            num_heads * head,
            None if q_order is None else repeated(q_order, self.num_heads),
        )
        latents = ColumnPart(0, sizes.kv_rank + sizes.rope, sizes.kv_rank + sizes.rope, key_order)
        self.kv_a_norm = RMSNorm(sizes.kv_rank, LATENT_NORM_EPS, shard)
        self.q_b_proj: MergedColumnParallelLinear | None = None
        self.q_a_norm = None
        names = "q_proj", "kv_a_proj_with_mqa"
        if sizes.q_rank:
            names = "q_a_proj", names[1]
            self.q_a_norm = RMSNorm(sizes.q_rank, LATENT_NORM_EPS, shard)
            self.q_b_proj = MergedColumnParallelLinear(
                sizes.q_rank, (queries,), shard.at("q_b_proj")
            )
            queries = ColumnPart(0, sizes.q_rank, sizes.q_rank)
        self.input_proj = LatentInputProjection(hidden_size, queries, latents, names, shard)
        self.indexer: Indexer | None = None
        if indexer is not None:
            at = shard.at("indexer")
            self.indexer = Indexer(hidden_size, sizes.q_rank, indexer, at)
            self.beside_rows = shard.gemms.beside_rows
            if self.beside_rows > 0 and shard.device.type == "cuda":
                side_stream(shard.device)
        self.gate_proj: MergedColumnParallelLinear | None = None
        if gates:
            part = ColumnPart(self.first_head * gates, self.num_heads * gates, num_heads * gates)
            self.gate_proj = MergedColumnParallelLinear(hidden_size, (part,), shard.at("g_proj"))
        self.kv_b_format = format_of(shard.scheme("kv_b_proj"), shard.prefix)
        self.kv_b = shard.parameter(self.num_heads, sizes.value + sizes.nope, sizes.kv_rank)
        gemms = shard.gemms
        self.forms = LatentForms(
            self.kv_b, sizes.value, sizes.scale, gemms.deterministic, kv_scales, gemms.few_rows
        )
        self.o_proj = RowParallelLinear(num_heads * sizes.value, hidden_size, shard.at("o_proj"))

    @property
    def input_form(self) -> RowForm | None:
        """Returns how inputs are best given; see `LinearMethod`. An indexer reads them plain, and
        so does a gate."""
        is_plain = self.indexer is not None or self.gate_proj is not None
        return None if is_plain else self.input_proj.input_form

    def forward(
        self,
        x: Rows,
        stream: ResidualStream,
        kv_cache: Tensor | IndexedLatents,
        inputs: AttentionInputs,
    ) -> None:
        """Attends for the normed `x`: [T, H]; `kv_cache`: [N, 1, 1, B, L + R], or with an indexer's
        keys."""
        sizes = self.sizes
        pages = None
        if isinstance(kv_cache, IndexedLatents):
            assert isinstance(kv_cache.latents, Tensor)
            cache, pages = kv_cache.latents, kv_cache.index
        else:
            cache = kv_cache[:, 0, 0]
        side: SideStream | NoSide = NO_SIDE
        queries, latents = self.input_proj(x)
        if self.q_b_proj is not None and self.q_a_norm is not None:
            normed = self.q_a_norm(queries)
            if self.indexer is not None and pages is not None:
                # Both read what is kept until the join.
                side = fork(normed, self.beside_rows)
                with side.beside():
                    inputs.choice.chosen = self.indexer(x, normed, pages, inputs)
            queries = self.q_b_proj(normed)
        heads = queries.view(len(x), self.num_heads, sizes.nope + sizes.rope)
        rest = inputs.positions, inputs.cos_sin_cache, cache, inputs.slot_mapping
        norm, scales = self.kv_a_norm.weight, self.forms.kv_scales
        rotated = heads[:, :, sizes.nope :]
        ops.latent_rope_and_cache(rotated, latents, norm, *rest, LATENT_NORM_EPS, scales)
        inputs.scale_queries(heads)
        attended = self.forms.attend(heads, cache, inputs, inputs.choice.chosen, side)
        attended = attended.flatten(1)
        if self.gate_proj is not None:
            attended = ops.sigmoid_and_mul(attended, self.gate_proj(x))
        self.o_proj.add_to(stream, attended, self.norm)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        sizes = self.sizes
        yield from self.input_proj.checkpoint_weights(prefix)
        if self.q_b_proj is not None and self.q_a_norm is not None:
            yield from self.q_a_norm.checkpoint_weights(f"{prefix}.q_a_layernorm")
            yield from self.q_b_proj.checkpoint_weights(f"{prefix}.q_b_proj")
        if self.indexer is not None:
            yield from self.indexer.checkpoint_weights(f"{prefix}.indexer")
        if self.gate_proj is not None:
            yield from self.gate_proj.checkpoint_weights(f"{prefix}.g_proj")
        yield from self.kv_a_norm.checkpoint_weights(f"{prefix}.kv_a_layernorm")
        head = sizes.nope + sizes.value
        shape = self.total_heads * head, sizes.kv_rank
        value_first = torch.cat((torch.arange(sizes.nope, head), torch.arange(sizes.nope)))
        part = LinearPart(
            f"{prefix}.kv_b_proj",
            shape,
            0,
            self.first_head * head,
            order=repeated(value_first, self.num_heads),
        )
        yield matrix_weight(self.kv_b_format, self.kv_b.view(-1, sizes.kv_rank), part)
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")


def _orders(sizes: LatentSizes) -> tuple[Tensor | None, Tensor | None]:
    """Returns the order of a query head's elements, and of latent and key together."""
    if sizes.rope_order is None:
        return None, None
    turned = torch.tensor(sizes.rope_order)
    return (
        torch.cat((torch.arange(sizes.nope), sizes.nope + turned)),
        torch.cat((torch.arange(sizes.kv_rank), sizes.kv_rank + turned)),
    )
