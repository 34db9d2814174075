"""The two forms of latent attention, which compute the same.

    absorbed   q_nope × W_UK, attend to latents, × W_UV        each query costs more
    expanded   latents × (W_UV, W_UK), attend to keys          each token of the context costs

What is expanded lies as [value | key] of each head, so that one GEMM writes both and the part of
the key that rotates is put behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.attention.by_head import by_head
from engine.layers.attention.context_passes import ContextPass
from engine.layers.attention.latent_backend import LatentBackend, LatentMetadata
from engine.layers.attention.layer import AttentionInputs
from engine.layers.side_stream import NO_SIDE, NoSide, SideStream
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import KVScales


@dataclass(frozen=True, slots=True)
class LatentForms:
    """Attends for one layer.

    Attributes:
        kv_b: [H, V + P, L]: what makes a value, and the part of a key that does not rotate.
        value: V.
        scale: Of the scores.
        fixed_order: A row's bits do not depend on the others.
        kv_scales: See `AttentionSpec`.
        few_rows: See `by_head`.
    """

    kv_b: Tensor
    value: int
    scale: float
    fixed_order: bool
    kv_scales: KVScales | None = None
    few_rows: int = 0

    def attend(
        self,
        heads: Tensor,
        cache: Tensor,
        inputs: AttentionInputs,
        chosen: Tensor | None = None,
        side: SideStream | NoSide = NO_SIDE,
    ) -> Tensor:
        """Attends for `heads` [T, H, P + R], rotated, once the step's latents are in `cache`
        [N, B, L + R].

        Args:
            chosen: [T, K] int32, what tokens attend to, as
                `tandem_kernels.reference.index.index_topk` returns it; None: to all. Contexts that
                are expanded are attended as a whole unless the metadata says that they choose.
            side: Where they are chosen.

        Returns:
            [T, H, V].
        """
        metadata, backend = inputs.metadata, inputs.backend
        if not isinstance(metadata, LatentMetadata) or not isinstance(backend, LatentBackend):
            return self.absorbed(heads, cache, metadata, chosen, side)
        side.join()
        of_rows = None
        if metadata.choosing is not None and chosen is not None:
            of_rows = chosen[metadata.rows]
        expanded = self.expanded(heads[metadata.rows], cache, metadata.passes, backend, of_rows)
        if metadata.before is None and metadata.after is None:
            return expanded
        first, end = metadata.rows.start, metadata.rows.stop
        attended = expanded.new_empty(len(heads), *expanded.shape[1:])
        attended[first:end] = expanded
        if metadata.before is not None:
            few = None if chosen is None else chosen[:first]
            attended[:first] = self.absorbed(heads[:first], cache, metadata.before, few)
        if metadata.after is not None:
            few = None if chosen is None else chosen[end:]
            attended[end:] = self.absorbed(heads[end:], cache, metadata.after, few)
        return attended

    def absorbed(
        self,
        heads: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        chosen: Tensor | None = None,
        side: SideStream | NoSide = NO_SIDE,
    ) -> Tensor:
        """Attends to the cache as it is: [T, H, P + R] -> [T, H, V]."""
        nope = self.kv_b.shape[1] - self.value
        w_uv, w_uk = torch.split(self.kv_b, [self.value, nope], dim=1)
        q_latent = self._by_head(heads[:, :, :nope], w_uk)
        side.join()
        queries, rest = (q_latent, heads[:, :, nope:], cache), (metadata, self.scale)
        attended = (
            ops.latent_attention(*queries, *rest, self.kv_scales)
            if chosen is None
            else ops.sparse_latent_attention(*queries, chosen, *rest, self.kv_scales)
        )
        return self._by_head(attended, w_uv.transpose(1, 2))

    def _by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return by_head(x, weight, fixed_order=self.fixed_order, few_rows=self.few_rows)

    def expanded(
        self,
        heads: Tensor,
        cache: Tensor,
        passes: tuple[ContextPass, ...],
        backend: LatentBackend,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attends to keys and values made of the cache, to all or to `chosen` [T, K]:
        [T, H, P + R] -> [T, H, V]."""

        def of_pass(part: ContextPass) -> tuple[Tensor, Tensor]:
            given = heads[part.rows], *self._expand(heads, cache, part), part.batch, self.scale
            if chosen is None:
                return backend.ragged(*given)
            bits = ops.chosen_bits(chosen[part.rows], part.batch, part.first)
            return ops.ragged_attention(*given, bits)

        first, *others = passes
        attended, log_sums = of_pass(first)
        for part in others:
            found, sums = of_pass(part)
            ops.merge_attention(attended[part.rows], log_sums[:, part.rows], found, sums)
        return attended

    def _expand(self, heads: Tensor, cache: Tensor, part: ContextPass) -> tuple[Tensor, Tensor]:
        """Returns keys [S, H, P + R] and values [S, H, V] of a part of the contexts."""
        num_heads, width, rank = self.kv_b.shape
        rope = cache.shape[2] - rank
        made = heads.new_empty(part.num_keys, num_heads, width + rope)
        latents = ops.gather_latents(
            cache,
            part.block_tables,
            part.first,
            part.batch.key_bounds,
            made[:, :, width:],
            self.kv_scales,
        )
        torch.bmm(
            latents.expand(num_heads, -1, -1),
            self.kv_b.transpose(1, 2),
            out=made[:, :, :width].transpose(0, 1),
        )
        return made[:, :, self.value :], made[:, :, : self.value]
