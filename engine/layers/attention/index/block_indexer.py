"""The indexer of a layer with heads: it keeps a key of each token, and chooses, for each group of
heads, the blocks of the context that a token attends to.

    x ── index_k_proj ─ norm ─ rotate ─ cache, [D] a token
    x ── index_q_proj ─ norm ─ rotate ─ [G, D] ── highest q . k of each block ─▶ the best blocks

The key is one for all groups, and every rank has it; a query belongs to the heads that share a KV
head, so ranks have those of their own. Contexts that have no more blocks than are chosen are
attended as a whole, and their keys are kept all the same, for they may grow. Source: MiniMax-M3,
2026, as transformers 5.24 computes it (`MiniMaxM3VLIndexer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from engine.layers.attention.index.indexer import is_sparse
from engine.layers.attention.layer import AttentionInputs, ChosenBlocks
from engine.layers.linear import MergedColumnParallelLinear, repeated
from engine.layers.methods.base import ColumnPart
from engine.layers.norm import RMSNorm
from engine.layers.rows import Rows
from engine.layers.shard import CheckpointWeight, Shard
from kv_transfer.planes import HeadRange
from tandem_kernels import ops
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.kv_pages import KVPages

_NAMES = ("index_q_proj", "index_k_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerSizes:
    """The sizes of an indexer.

    Attributes:
        groups: Of heads, of all ranks: as many as KV heads.
        dim: Of queries and keys: that of a head, which rotates as they do.
    """

    groups: int
    dim: int
    choice: BlockChoice


class BlockIndexer(nn.Module):
    """Chooses the blocks that each token of a step attends to.

    Args:
        groups: Of this rank.
        shard: Of the attention around it.
        order: See `engine.rope.Rotary.head_order`.
        norm_offset: See `RMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: BlockIndexerSizes,
        groups: HeadRange,
        shard: Shard,
        *,
        eps: float,
        norm_offset: float,
        order: Tensor | None,
    ) -> None:
        super().__init__()
        self.sizes, self.count, self.eps = sizes, groups.count, eps
        dim = sizes.dim
        of_groups = None if order is None else repeated(order, groups.count)
        parts = (
            ColumnPart(groups.start * dim, groups.count * dim, sizes.groups * dim, of_groups),
            ColumnPart(0, dim, dim, order),
        )
        self.proj = MergedColumnParallelLinear(hidden_size, parts, shard, names=_NAMES)
        self.q_norm, self.k_norm = (
            RMSNorm(dim, eps, shard, offset=norm_offset, order=order) for _ in range(2)
        )

    def forward(self, x: Rows, index: Tensor, inputs: AttentionInputs) -> ChosenBlocks | None:
        """Writes the step's keys, and chooses for `x` [T, hidden]; `index` is that of
        `IndexedKV`. None: every context of the step
        is attended as a whole."""
        projected = self.proj(x)
        heads = projected.view(len(projected), self.count + 1, self.sizes.dim)
        pages = IndexPages(index.view(heads.dtype))
        queries, keys = heads[:, : self.count], heads[:, self.count :]
        # The pages of keys alone, as those of values that have no numbers.
        of_heads = pages.keys[:, None]
        ops.rope_and_cache(
            queries,
            keys,
            keys[:, :, :0],
            inputs.positions,
            inputs.cos_sin_cache,
            KVPages(of_heads, of_heads[..., :0]),
            inputs.slot_mapping,
            self.q_norm.weight,
            self.k_norm.weight,
            self.eps,
        )
        choice = self.sizes.choice
        if not is_sparse(inputs.metadata, choice.num_tokens):
            return None
        return ChosenBlocks(ops.choose_blocks(queries, pages, inputs.metadata, choice), choice)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `prefix` is the name of the attention around it."""
        yield from self.proj.checkpoint_weights(*(f"{prefix}.{name}" for name in _NAMES))
        yield from self.q_norm.checkpoint_weights(f"{prefix}.index_q_norm")
        yield from self.k_norm.checkpoint_weights(f"{prefix}.index_k_norm")
