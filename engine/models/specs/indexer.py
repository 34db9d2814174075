"""Describes the indexer of sparse attention, apart from the rest of its model."""

from __future__ import annotations

import msgspec

from engine.config import Dtype
from kv_transfer.group_sizes import INDEX_PLANE, INDEX_SCALE_PLANE
from kv_transfer.layout import DTYPE_BYTES, Plane


class IndexerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says how a layer chooses the tokens that it attends to; see
    `engine.layers.attention.indexer`.

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
