"""Describes indexers of sparse attention, apart from the rest of their model."""

from __future__ import annotations

import msgspec

from engine.config import Dtype
from kv_transfer.group_sizes import INDEX_PLANE, INDEX_SCALE_PLANE
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane


class IndexerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says how a layer chooses the tokens that it attends to; see
    `engine.layers.attention.index.indexer`.

    Attributes:
        heads, dim: Of its queries; a token has one key, of `dim` numbers.
        top_k: The most tokens that a query attends to.
        interleaved: Pair i of what rotates is elements 2i and 2i + 1 in the checkpoint.
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool

    def planes(self, dtype: Dtype) -> tuple[Plane, ...]:
        """Returns what a layer keeps of a token's index key. A model in float32 keeps float32, all
        others e4m3 numbers and a scale: the choice is nearly the same."""
        if dtype == "float32":
            width = self.dim * DTYPE_BYTES[dtype]
            return (Plane(INDEX_PLANE, 1, width, replicated=True),)
        return (
            Plane(INDEX_PLANE, 1, self.dim, replicated=True),
            Plane(INDEX_SCALE_PLANE, 1, DTYPE_BYTES["float32"], replicated=True),
        )


class BlockIndexerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says how a layer chooses the blocks that a KV head's group attends to; see
    `engine.layers.attention.index.block_indexer`.

    Attributes:
        heads: Queries of a token, one for each KV head; a token has one key.
        dim: Numbers of either.
        size, top_k, local: See `tandem_kernels.attention.block_choice.BlockChoice`.
    """

    heads: int
    dim: int
    size: int
    top_k: int
    local: int

    def plane(self, dtype: Dtype) -> Plane:
        """Returns what a layer keeps of a token's index key, in the model's type."""
        return Plane(INDEX_PLANE, 1, self.dim * DTYPE_BYTES[dtype], replicated=True)
