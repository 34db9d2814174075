"""Attention over the paged KV cache. Sources: Kwon et al., PagedAttention (arXiv 2309.06180);
Ainslie et al., grouped queries (arXiv 2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.layers.attention.backend import AttentionBackend, AttentionSpec, WholeImage
from engine.layers.attention.row_inputs import GroupPlaces
from engine.layers.attention.shared_choice import RankShares
from engine.layers.attention.whole_images import attend_images
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.attention.value_form import PLAIN_VALUES, ValueForm


@dataclass(slots=True)
class ChosenTokens:
    """Holds what the last indexer of a pass has chosen, for the layers behind it that have none.

    Attributes:
        chosen: As `tandem_kernels.reference.index.index_topk` returns it; None: everything.
        stays: Indexers behind it, too, keep their keys alone, and take this.
        shares: For which tokens a rank chooses, which all indexers of the pass have in common.
    """

    chosen: Tensor | None = None
    stays: bool = False
    shares: RankShares = field(default_factory=RankShares)

    def keep(self) -> None:
        """Makes the choice stay for the tokens that follow in the same rows. Where it was all that
        there was, it goes on with what comes."""
        if self.chosen is not None:
            place = torch.arange(self.chosen.shape[1], device=self.chosen.device).int()
            self.chosen = torch.where(self.chosen < 0, place, self.chosen)
            self.stays = True


@dataclass(frozen=True, slots=True)
class ChosenBlocks:
    """Holds what the indexer of a layer with heads has chosen for the tokens of a step.

    Attributes:
        chosen: As `tandem_kernels.reference.block_sparse.choose_blocks` returns it.
    """

    chosen: Tensor
    choice: BlockChoice

    def of_rows(self, rows: Tensor) -> ChosenBlocks:
        """Returns those of some tokens, [n]."""
        return ChosenBlocks(self.chosen.index_select(0, rows), self.choice)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Holds what all layers of one step share.

    Attributes:
        positions: [T] int64.
        cos_sin_cache: [max_model_len, head_dim] float32.
        slot_mapping: [T] int64, where each token's key and value go; -1: nowhere.
        metadata: The ragged batch, as `backend` made it.
        query_scales: [T] float32, by which queries are multiplied when they are rotated; None: by
            nothing.
        kept: The same of the tokens that the last layer keeps, each of which decodes: its request's
            keys are in the cache. None: they are attended with all others.
        choice: Of a sparse layer, for those behind it.
        images: Those of the step whose tokens see each other.
        others: Of a layer whose cache is in several groups: those behind the first.
        token_ids: [T] int64, -1: padding. None: no layer chooses experts by them.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    slot_mapping: Tensor
    metadata: AttentionMetadata
    backend: AttentionBackend
    kept: AttentionMetadata | None = None
    query_scales: Tensor | None = None
    choice: ChosenTokens = field(default_factory=ChosenTokens)
    images: tuple[WholeImage, ...] = ()
    others: tuple[GroupPlaces, ...] = ()
    token_ids: Tensor | None = None

    def scale_queries(self, queries: Tensor) -> None:
        """Multiplies `queries` [T, ...] in place, where scores grow with the position."""
        if self.query_scales is not None:
            queries.mul_(self.query_scales.view(-1, *(1,) * (queries.dim() - 1)))


class Attention(nn.Module):
    """Attends over one layer's cache [N, 2, Hkv, B, D], or its pages, once the step's keys and
    values are there.

    Args:
        values: What is done to values before they are written.
    """

    def __init__(self, spec: AttentionSpec, values: ValueForm = PLAIN_VALUES) -> None:
        super().__init__()
        self.spec, self.values = spec, values

    def write(
        self,
        qkv: Tensor,
        kv_cache: PagedKV,
        inputs: AttentionInputs,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rotates, and writes keys and values into the cache: [T, Hq D + Hkv (D + Dv)], in the same
        memory. The weights, [D], normalise each head before RoPE.
        """
        spec = self.spec
        q, k, v = spec.split(qkv)
        ops.rope_and_cache(
            q,
            k,
            v,
            inputs.positions,
            inputs.cos_sin_cache,
            kv_cache,
            inputs.slot_mapping,
            q_weight,
            k_weight,
            eps,
            keep_k=inputs.backend.reads_new_keys(inputs.metadata),
            kv_scales=spec.kv_scales,
            values=self.values,
        )
        return qkv

    def forward(
        self,
        heads: Tensor,
        kv_cache: PagedKV,
        inputs: AttentionInputs,
        kept: Tensor | None = None,
        blocks: ChosenBlocks | None = None,
    ) -> Tensor:
        """Attends: heads as `write` returns them -> [T, Hq * Dv], or the rows `kept` [n] of it.
        `blocks`: to these alone."""
        if kept is not None and inputs.kept is not None:
            few, metadata = heads.index_select(0, kept), inputs.kept
            of_few = None if blocks is None else blocks.of_rows(kept)
            return self._attended(few, kv_cache, inputs.backend, metadata, of_few).flatten(1)
        spec = self.spec
        attended = self._attended(heads, kv_cache, inputs.backend, inputs.metadata, blocks)
        if inputs.images:
            attend_images(attended, spec, heads, kv_cache, inputs.metadata, inputs.images)
        attended = attended.flatten(1)
        return attended if kept is None else attended.index_select(0, kept)

    def _attended(
        self,
        heads: Tensor,
        kv_cache: PagedKV,
        backend: AttentionBackend,
        metadata: AttentionMetadata,
        blocks: ChosenBlocks | None,
    ) -> Tensor:
        spec = self.spec
        if blocks is None:
            return backend.attend(spec, heads, kv_cache, metadata)
        queries, rest = spec.queries(heads), (metadata, blocks.choice, spec.scale, spec.kv_scales)
        return ops.block_sparse_attention(queries, kv_cache, blocks.chosen, *rest)
