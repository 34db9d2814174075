"""Chooses the rows of several tokens that each token attends to, as `indexer` chooses tokens.

Its keys are rows, too, of the same tokens: `row_compressor` makes them. Every rank has it whole,
and chooses for some of the tokens of a long step: all choose alike. Source: DeepSeek-V4, 2026, as
transformers 5.24 computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.row_inputs import GroupPlaces
from engine.layers.attention.shared_choice import SharedChoice
from engine.layers.float32_sums import float32_sums
from engine.layers.linear import ReplicatedLinear
from engine.layers.rows import Rows
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.attention.index_pages import IndexPages


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIndexerSizes:
    """The sizes of an indexer of rows.

    Attributes:
        heads, dim: Of its queries, H and D.
        top_k: The most rows that are chosen.
    """

    heads: int
    dim: int
    top_k: int


class RowIndexer(nn.Module):
    """Chooses rows of `tokens` tokens each.

    Args:
        q_rank: Of the queries' latent.
    """

    def __init__(
        self, hidden_size: int, q_rank: int, sizes: RowIndexerSizes, tokens: int, shard: Shard
    ) -> None:
        super().__init__()
        self.sizes, self.tokens, self.gemms = sizes, tokens, shard.gemms
        self.wq_b = ReplicatedLinear(q_rank, sizes.heads * sizes.dim, shard.at("wq_b"))
        self.weights_proj = shard.parameter(sizes.heads, hidden_size)
        self.scale = (sizes.heads * sizes.dim) ** -0.5
        self.choice = SharedChoice(shard.tp, sizes.top_k, tokens)

    def forward(
        self,
        q_latent: Rows,
        keys: Tensor,
        head_weights: Tensor,
        pages: IndexPages,
        inputs: AttentionInputs,
        places: GroupPlaces,
    ) -> Tensor | None:
        """Writes the keys of closed rows, [T, dim], and chooses: [T, q_rank] and [T, H] -> numbers
        of rows as `tandem_kernels.reference.index.index_topk` returns them. None: all that a token
        sees are attended to."""
        sizes, metadata = self.sizes, places.metadata
        queries, weights = ops.index_rows(
            self.wq_b(q_latent).view(len(keys), sizes.heads, sizes.dim),
            keys,
            head_weights,
            inputs.positions,
            inputs.cos_sin_cache,
            pages,
            places.slot_mapping,
        )
        if metadata.max_seq_len // self.tokens <= sizes.top_k:
            return None
        return self.choice.choose(queries, weights, pages, metadata, inputs.choice.shares)

    def head_weights(self, x: Tensor) -> Tensor:
        """Returns those of tokens [T, hidden], with the scale of scores, [T, H] float32."""
        sums = float32_sums(x, self.weights_proj, self.gemms)
        if sums is None:
            sums = F.linear(x.float(), self.weights_proj.float())
        return sums.mul_(self.scale)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.wq_b.checkpoint_weights(f"{prefix}.wq_b")
        weight = self.weights_proj
        yield CheckpointWeight(f"{prefix}.weights_proj.weight", weight, tuple(weight.shape))
