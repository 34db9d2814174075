"""The indexer of a sparse layer: it keeps a key of each token, and chooses what a token attends to.

    x ───────── wk ─ norm ─ rotate ─ cache, [D] a token
    x ───────── weights_proj ─ [H]  ─┐
    q latent ── wq_b ─ rotate ─ [H, D] ─ sum of w * relu(q . k) ─ the highest top_k ─▶ positions

Every rank has it whole, and chooses for some of the tokens of a long step (`shared_choice`): all
choose alike. Contexts of up to `top_k` tokens are attended as a whole, and nothing is chosen of
them; their keys are kept all the same, for they may grow. Source: DeepSeek-V3.2, 2025 (arXiv
2512.02556), 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.attention.latent_backend import LatentMetadata
from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.shared_choice import RankShare, RankShares, SharedChoice
from engine.layers.float32_sums import float32_sums
from engine.layers.linear import MergedColumnParallelLinear, repeated
from engine.layers.methods.base import ColumnPart
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages

_NORM_EPS = 1e-6
"""transformers takes it for the norm of keys, whatever config.json says of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSizes:
    """The sizes of an indexer.

    Attributes:
        heads, dim: Of its queries, H and D.
        rope: The first this many elements of queries and keys rotate.
        top_k: The most tokens that are chosen.
        rope_order: See `engine.rope.Rotary.head_order`, for the `rope` elements.
    """

    heads: int
    dim: int
    rope: int
    top_k: int
    rope_order: tuple[int, ...] | None = None


class KeyNorm(nn.Module):
    """Holds weight and bias [D] of the keys' LayerNorm; element i of ours is element `order[i]` of
    the checkpoint's."""

    def __init__(self, size: int, shard: Shard, order: Tensor | None) -> None:
        super().__init__()
        self.order = order
        self.weight, self.bias = (shard.parameter(size, dtype=torch.float32) for _ in range(2))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            yield CheckpointWeight(f"{prefix}.{name}", parameter, shape, order=self.order)


class Indexer(nn.Module):
    """Chooses the tokens that each token of a step attends to.

    Args:
        q_rank: Of the queries' latent.
    """

    def __init__(self, hidden_size: int, q_rank: int, sizes: IndexerSizes, shard: Shard) -> None:
        super().__init__()
        self.sizes, self.gemms = sizes, shard.gemms
        heads, dim = sizes.heads, sizes.dim
        order = None
        if sizes.rope_order is not None:
            order = torch.cat((torch.tensor(sizes.rope_order), torch.arange(sizes.rope, dim)))
        of_heads = None if order is None else repeated(order, heads)
        queries = ColumnPart(0, heads * dim, heads * dim, of_heads)
        keys = ColumnPart(0, dim, dim, order)
        self.wq_b = MergedColumnParallelLinear(q_rank, (queries,), shard.at("wq_b"))
        self.wk = MergedColumnParallelLinear(hidden_size, (keys,), shard.at("wk"))
        self.k_norm = KeyNorm(dim, shard, order)
        self.weights_proj = shard.parameter(heads, hidden_size)
        self.scale = (heads * dim) ** -0.5
        self.choice = SharedChoice(shard.tp, sizes.top_k)

    def forward(
        self, x: Tensor, q_latent: Tensor, pages: IndexPages, inputs: AttentionInputs
    ) -> Tensor | None:
        """Writes the step's keys and chooses: [T, hidden] and [T, q_rank] -> positions as
        `tandem_kernels.reference.index.index_topk` returns them. None: every context of the step is
        attended as a whole. Rows that are attended as a whole may be anything."""
        k, head_weights = self.wk(x), self._head_weights(x)
        places = inputs.positions, inputs.slot_mapping
        share = self._share(inputs, len(x), x.device)
        if share is not None:
            rows, nothing = share.rows, k.new_empty((len(k), 0, k.shape[1]))
            self._rotate(nothing, k, head_weights[:, :0], places, pages, inputs)
            own = inputs.positions[rows], torch.full_like(rows, -1)
            given = self._queries(q_latent[rows]), k[rows], head_weights[rows], own
            return self.choice.choose_together(*self._rotate(*given, pages, inputs), pages, share)
        given = self._queries(q_latent), k, head_weights, places
        queries, weights = self._rotate(*given, pages, inputs)
        if inputs.choice.stays:
            return inputs.choice.chosen
        return self._choose(queries, weights, pages, inputs)

    def _queries(self, q_latent: Tensor) -> Tensor:
        made: Tensor = self.wq_b(q_latent)
        return made.view(len(q_latent), self.sizes.heads, self.sizes.dim)

    def _rotate(
        self,
        queries: Tensor,
        k: Tensor,
        head_weights: Tensor,
        places: tuple[Tensor, Tensor],
        pages: IndexPages,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """Rotates, and writes keys; `places` are positions and slots."""
        norm = self.k_norm.weight, self.k_norm.bias
        positions, slots = places
        table = inputs.cos_sin_cache
        rest = positions, table, pages, slots, _NORM_EPS
        return ops.index_rope_and_cache(queries, k, norm, head_weights, *rest)

    def _share(
        self, inputs: AttentionInputs, num_tokens: int, device: torch.device
    ) -> RankShare | None:
        """Returns this rank's share of a step in which all tokens choose; then those of other ranks
        need no queries here. None: there is none, or it is one of a part of the step."""
        metadata = inputs.metadata
        if isinstance(metadata, LatentMetadata):
            if metadata.choosing is None or metadata.rows != slice(0, num_tokens):
                return None
            metadata = metadata.choosing
        if inputs.choice.stays or not is_sparse(metadata, self.sizes.top_k):
            return None
        if not self.choice.is_shared(num_tokens, metadata, device):
            return None
        return inputs.choice.shares.of(metadata, num_tokens, self.choice.group)

    def _choose(
        self, queries: Tensor, weights: Tensor, pages: IndexPages, inputs: AttentionInputs
    ) -> Tensor | None:
        metadata, shares = inputs.metadata, inputs.choice.shares
        if not isinstance(metadata, LatentMetadata):
            return self._chosen(queries, weights, pages, metadata, shares)
        parts = (
            (metadata.before, slice(0, metadata.rows.start)),
            (metadata.choosing, metadata.rows),
            (metadata.after, slice(metadata.rows.stop, len(queries))),
        )
        found = {
            rows.start: self._chosen(queries[rows], weights[rows], pages, part, shares)
            for part, rows in parts
            if part is not None
        }
        if not any(chosen is not None for chosen in found.values()):
            return None
        whole = queries.new_empty((len(queries), self.sizes.top_k), dtype=torch.int32)
        for start, chosen in found.items():
            if chosen is not None:
                whole[start : start + len(chosen)] = chosen
        return whole

    def _chosen(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: IndexPages,
        metadata: AttentionMetadata,
        shares: RankShares,
    ) -> Tensor | None:
        if not is_sparse(metadata, self.sizes.top_k):
            return None
        return self.choice.choose(queries, weights, pages, metadata, shares)

    def _head_weights(self, x: Tensor) -> Tensor:
        """Returns [T, H] float32, with the scale of scores."""
        weight = self.weights_proj
        sums = float32_sums(x, weight, self.gemms)
        if sums is None:
            sums = F.linear(x.float(), weight.float())
        return sums.mul_(self.scale)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.wq_b.checkpoint_weights(f"{prefix}.wq_b")
        yield from self.wk.checkpoint_weights(f"{prefix}.wk")
        yield from self.k_norm.checkpoint_weights(f"{prefix}.k_norm")
        weight = self.weights_proj
        yield CheckpointWeight(f"{prefix}.weights_proj.weight", weight, tuple(weight.shape))


def is_sparse(metadata: AttentionMetadata, top_k: int) -> bool:
    """Returns whether the tokens of a step attend to chosen ones. In fixed order they always do: a
    short context is added up as it will be when it has grown."""
    return metadata.fixed_order or metadata.max_seq_len > top_k
