"""Attention to a window of tokens and, in most layers, to rows that stand for several.

    x ─┬─ wq_a ─ norm ─┬─ wq_b ─ norm of heads ─ rotate ─┐
       │               └─ indexer: which rows ───────────┤
       ├─ wkv ─ norm ─ rotate ─ window, [D] a token ─────┤ attend ─ rotate back ─ wo_a ─ wo_b
       └─ compressor ─ rows, [D] of several tokens ──────┘

What the cache keeps of a token or a row is key and value at once, for all heads. Heads are split
over ranks in the groups of `wo_a`, which projects each group by itself; all else is whole on each.
Source: DeepSeek-V4, 2026, as transformers 5.24 computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.rows.group_projection import GroupProjection
from engine.layers.attention.rows.row_compressor import RowCompressor
from engine.layers.attention.rows.row_indexer import RowIndexer, RowIndexerSizes
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.base import ColumnPart
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import QuantisedRows, Rows
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.side_stream import NoSide, SideStream, fork, side_stream
from tandem_kernels import ops
from tandem_kernels.attention.index_pages import CachesByGroup, IndexedLatents, LayerCache, OpenRows
from tandem_kernels.attention.token_rows import (
    BackTurn,
    NarrowRows,
    OpenTokens,
    RowPages,
    SeenRows,
    TokenRowForm,
)
from tandem_kernels.attention.window_rows_shapes import attends_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRowsSizes:
    """The sizes of such a layer.

    Attributes:
        q_rank: Of the queries' latent.
        head_dim: Of a query head, and of what a token or a row keeps.
        groups, group_rank: Of the output's first projection, over all ranks: groups of heads, and
            numbers of each.
        eps: Of norms.
        tokens: That a row stands for; 0: there are no rows.
        overlap: A row takes in the tokens of the one before it.
        indexer: Chooses rows; None: all are attended to.
    """

    q_rank: int
    head_dim: int
    groups: int
    group_rank: int
    eps: float
    tokens: int = 0
    overlap: bool = False
    indexer: RowIndexerSizes | None = None

    @property
    def forms(self) -> tuple[tuple[str, TokenRowForm], ...]:
        """Returns what rows there are, with the names of their modules."""
        if not self.tokens:
            return ()
        own = TokenRowForm(self.tokens, self.overlap, self.head_dim)
        if self.indexer is None:
            return (("compressor", own),)
        keys = TokenRowForm(self.tokens, self.overlap, self.indexer.dim, first=2 * own.width)
        return (("compressor", own), ("indexer.compressor", keys))


def _vectors_in(cache: LayerCache) -> RowPages:
    """Returns the vectors that a layer keeps in one group."""
    if isinstance(cache, NarrowRows):
        return cache
    assert isinstance(cache, Tensor)
    return cache[:, 0, 0]


@dataclass(frozen=True, slots=True)
class _Closed:
    """Holds what a step's tokens give to rows.

    Attributes:
        rows: Those that they close, [T, dim] float32 of each kind.
        weights: [T, H] float32, of the indexer's heads; None: there is no indexer.
        pages: Of the attention's own rows.
        side: Where all that is computed.
    """

    rows: list[Tensor]
    weights: Tensor | None
    pages: RowPages
    side: SideStream | NoSide


class WindowRowsBlock(nn.Module):
    """Adds such attention to the residual stream.

    Args:
        num_heads: Of all ranks.
        norm: Of what is added; None: none.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: WindowRowsSizes,
        shard: Shard,
        *,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.sizes, self.norm = sizes, norm
        self.first_head, self.num_heads = shard.part(num_heads)
        self.total_heads = num_heads
        dim = sizes.head_dim
        parts = (ColumnPart(0, size, size) for size in (sizes.q_rank, dim))
        self.inputs = MergedColumnParallelLinear(
            hidden_size, tuple(parts), shard, names=("wq_a", "wkv")
        )
        self.q_norm = RMSNorm(sizes.q_rank, sizes.eps, shard)
        self.kv_norm = shard.parameter(dim, dtype=torch.float32)
        heads = ColumnPart(self.first_head * dim, self.num_heads * dim, num_heads * dim)
        self.wq_b = MergedColumnParallelLinear(sizes.q_rank, (heads,), shard.at("wq_b"))
        self.sinks = shard.parameter(self.num_heads, dtype=torch.float32)
        width = num_heads * dim // sizes.groups
        of_group = sizes.group_rank, sizes.groups, dim
        self.wo_a = GroupProjection(width, *of_group, shard.at("wo_a"))
        self.wo_b = RowParallelLinear(
            sizes.groups * sizes.group_rank, hidden_size, shard.at("wo_b")
        )
        self.compressor: RowCompressor | None = None
        self.indexer: RowIndexer | None = None
        if sizes.tokens:
            self.compressor = RowCompressor(hidden_size, sizes.forms, sizes.eps, shard)
        if sizes.indexer is not None:
            own = sizes.indexer, sizes.tokens, shard.at("indexer")
            self.indexer = RowIndexer(hidden_size, sizes.q_rank, *own)
        self.beside_rows = shard.gemms.beside_rows
        if self.beside_rows > 0 and shard.device.type == "cuda":
            side_stream(shard.device)

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> None:
        """Attends for the normed `x`: [T, H]."""
        caches = kv_cache.caches if isinstance(kv_cache, CachesByGroup) else (kv_cache,)
        pages, sizes = _vectors_in(caches[0]), self.sizes
        closed = self._closed(x, caches[1:], inputs)
        latents, kv = self.inputs(x).split((sizes.q_rank, sizes.head_dim), dim=1)
        latents = self._normed(latents)
        if closed is not None:
            closed.side.follow()
        heads = self.wq_b(latents).view(len(x), self.num_heads, sizes.head_dim)
        turn = inputs.positions, inputs.cos_sin_cache
        is_fp8 = self.wo_a.takes_fp8(len(x))
        # Where many attend ahead, queries are normed and rotated as they are multiplied.
        is_late = not is_fp8 and attends_ahead(heads, pages, inputs.metadata)
        to_cache = kv, self.kv_norm, *turn, pages, inputs.slot_mapping, sizes.eps
        ops.shared_rope_and_cache(heads[:, :0] if is_late else heads, *to_cache)
        rows = self._rows(closed, latents, caches[1:], inputs)
        if closed is not None:
            closed.side.join()
        scale = sizes.head_dim**-0.5
        given = heads, pages, inputs.metadata, scale, self.sinks, rows, BackTurn(*turn)
        if is_fp8:
            mixed = self.wo_a.quantised(QuantisedRows(*ops.window_rows_fp8(*given)), x.dtype)
        else:
            attended = ops.window_rows_attention(*given, sizes.eps if is_late else None)
            mixed = self.wo_a(attended.view(len(x), self.wo_a.num_groups, -1))
        out: Tensor = self.wo_b(mixed)
        stream.add(out if self.norm is None else self.norm(out))

    def _normed(self, latents: Tensor) -> Rows:
        """Returns the norm of the queries' latents [T, rank], as all that read it ask for it."""
        form, indexer = self.wq_b.input_form, self.indexer
        if form is None or (indexer is not None and indexer.wq_b.input_form != form):
            normed: Tensor = self.q_norm(latents)
            return normed
        return self.q_norm.add_quantised(None, latents, form)

    def _closed(
        self, x: Tensor, caches: tuple[LayerCache, ...], inputs: AttentionInputs
    ) -> _Closed | None:
        """Computes and keeps closed rows, and weights of the indexer's heads: beside queries in
        recorded steps of few tokens."""
        if self.compressor is None:
            return None
        opened, of_tokens = caches[0], inputs.others[0]
        assert isinstance(opened, OpenRows)
        left = OpenTokens(opened.planes[0], of_tokens.slot_mapping, of_tokens.metadata)
        side = fork(x, self.beside_rows)
        cache, of_rows = caches[1], inputs.others[1]
        pages = cache.latents if isinstance(cache, IndexedLatents) else _vectors_in(cache)
        with side.beside():
            rows = self.compressor(x, left, inputs)
            weights = None if self.indexer is None else self.indexer.head_weights(x)
            ops.cache_rows(rows[0], pages, of_rows.slot_mapping)
        return _Closed(rows, weights, pages, side)

    def _rows(
        self,
        closed: _Closed | None,
        latents: Rows,
        caches: tuple[LayerCache, ...],
        inputs: AttentionInputs,
    ) -> SeenRows | None:
        """Returns the rows that tokens attend to, which are chosen beside queries as they are
        closed."""
        if closed is None:
            return None
        of_rows, chosen = inputs.others[1], None
        if self.indexer is not None:
            cache = caches[1]
            assert isinstance(cache, IndexedLatents) and closed.weights is not None
            given = latents, closed.rows[1], closed.weights
            with closed.side.beside():
                chosen = self.indexer(*given, cache.index, inputs, of_rows)
        return SeenRows(closed.pages, of_rows.metadata.block_tables, self.sizes.tokens, chosen)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        sizes = self.sizes
        yield from self.inputs.checkpoint_weights(f"{prefix}.wq_a", f"{prefix}.wkv")
        yield from self.q_norm.checkpoint_weights(f"{prefix}.q_norm")
        yield CheckpointWeight(f"{prefix}.kv_norm.weight", self.kv_norm, (sizes.head_dim,))
        yield from self.wq_b.checkpoint_weights(f"{prefix}.wq_b")
        yield CheckpointWeight(
            f"{prefix}.attn_sink", self.sinks, (self.total_heads,), 0, self.first_head
        )
        yield from self.wo_a.checkpoint_weights(f"{prefix}.wo_a")
        yield from self.wo_b.checkpoint_weights(f"{prefix}.wo_b")
        if self.compressor is not None:
            yield from self.compressor.checkpoint_weights(prefix)
        if self.indexer is not None:
            yield from self.indexer.checkpoint_weights(f"{prefix}.indexer")
