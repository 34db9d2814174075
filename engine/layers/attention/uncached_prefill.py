"""Uncached prefill: prompts that have no cached beginning are attended straight from the
projection, by a library whose kernels are faster than ours there, but cannot read pages.

    query rows   0 ........ num_decodes ............... end ............. T
                 |  decodes |  uncached prompts         |  other chunks   |
                 |  paged   |  `DensePrefill`           |  paged          |

Long uncached prompts come first among those that end, and first among those that leave a rest; the
ones that lie together behind the decodes are attended apart. Layers with a window are paged: little
of a prompt is seen through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.layers.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    PrefillChunk,
    StepBatch,
    StepOrder,
)
from engine.layers.attention.paged import PagedBackend
from tandem_kernels.attention.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class UncachedPrefillMetadata(AttentionMetadata):
    """A step's metadata, and its parts.

    Attributes:
        prompt_lens: Query lengths of the uncached prompts behind the decodes.
        decodes: The decodes alone; None: there are none.
        others: The requests behind the uncached prompts; their query rows count from `end`. None:
            there are none.
    """

    prompt_lens: tuple[int, ...] = ()
    decodes: AttentionMetadata | None = None
    others: AttentionMetadata | None = None

    @property
    def end(self) -> int:
        """Returns the query row behind the uncached prompts."""
        return self.num_decode_tokens + sum(self.prompt_lens)


class DensePrefill(ABC):
    """The kernels of a library, for uncached prompts.

    Attributes:
        name: In logs.
        min_tokens: Shorter prompts take less time together with the rest of the batch.
        has_sinks: It computes `AttentionSpec.sinks`.
    """

    name: str
    min_tokens: int
    has_sinks: ClassVar[bool] = False

    @abstractmethod
    def attend(
        self, spec: AttentionSpec, heads: Tensor, metadata: UncachedPrefillMetadata
    ) -> Tensor:
        """Computes causal attention of the prompts in `metadata.prompt_lens`.

        Args:
            heads: [T, Hq + 2 Hkv, D], queries, keys and values of the whole batch, rotated.

        Returns:
            [T, Hq, D], whose rows of other requests are anything.
        """

    @abstractmethod
    def prepare(
        self, num_heads: int, kv_cache: Tensor, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """Prepares as `AttentionBackend.prepare` says."""


@dataclass(frozen=True, slots=True)
class UncachedPrefillBackend(AttentionBackend):
    """Attends to long uncached prompts by `dense`, and to all others by `paged`.

    Attributes:
        recorded_tokens: Steps of no more tokens are all `paged`, because they may be recorded.
    """

    dense: DensePrefill
    paged: PagedBackend = field(default_factory=PagedBackend)
    recorded_tokens: int = 0

    def prepare(
        self, num_heads: int, kv_cache: Tensor, dtype: torch.dtype, max_tokens: int
    ) -> None:
        self.dense.prepare(num_heads, kv_cache, dtype, max_tokens)

    def order(self, chunks: list[PrefillChunk]) -> list[PrefillChunk]:
        """Orders long uncached prompts first; the others stay as they came."""

        def is_other(chunk: PrefillChunk) -> bool:
            return chunk.num_tokens < self.dense.min_tokens or chunk.num_computed > 0

        return sorted(chunks, key=is_other)

    def graph_ok(self, order: StepOrder) -> bool:
        return not self._prompt_lens(order) and self.paged.graph_ok(order)

    def metadata(self, batch: StepBatch) -> AttentionMetadata:
        metadata = self.paged.metadata(batch)
        prompt_lens = () if batch.window is not None else self._prompt_lens(batch.order)
        return split_metadata(metadata, prompt_lens) if prompt_lens else metadata

    def reads_new_keys(self, metadata: AttentionMetadata) -> bool:
        return isinstance(metadata, UncachedPrefillMetadata)

    def attend(
        self, spec: AttentionSpec, heads: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        if not isinstance(metadata, UncachedPrefillMetadata):
            return self.paged.attend(spec, heads, kv_cache, metadata)
        attended = self.dense.attend(spec, heads, metadata)
        first, end = metadata.num_decode_tokens, metadata.end
        if metadata.decodes is not None:
            attended[:first] = self.paged.attend(spec, heads[:first], kv_cache, metadata.decodes)
        if metadata.others is not None:
            attended[end:] = self.paged.attend(spec, heads[end:], kv_cache, metadata.others)
        return attended

    def _prompt_lens(self, order: StepOrder) -> tuple[int, ...]:
        """Lengths of the long uncached prompts that lie together behind the decodes."""
        if int(order.query_lens.sum()) <= self.recorded_tokens:
            return ()
        first = order.num_decodes
        query_lens = order.query_lens[first:].tolist()
        seq_lens = order.seq_lens[first:].tolist()
        count = 0
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            if query_len < self.dense.min_tokens or query_len < seq_len:
                break
            count += 1
        return tuple(query_lens[:count])


def split_metadata(
    metadata: AttentionMetadata, prompt_lens: tuple[int, ...]
) -> UncachedPrefillMetadata:
    """Returns `metadata` with the parts that lie around `prompt_lens`, which is not empty."""
    first, end = metadata.num_decodes, metadata.num_decodes + len(prompt_lens)
    decodes = others = None
    if first > 0:
        decodes = replace(
            metadata,
            block_tables=metadata.block_tables[:first],
            query_start_loc=metadata.query_start_loc[: first + 1],
            seq_lens=metadata.seq_lens[:first],
            max_query_len=metadata.decode_query_len,
        )
    if end < len(metadata.seq_lens):
        # Copies, because kernels are compiled by how addresses are aligned.
        others = replace(
            metadata,
            block_tables=metadata.block_tables[end:].clone(),
            query_start_loc=metadata.query_start_loc[end:]
            - (metadata.num_decode_tokens + sum(prompt_lens)),
            seq_lens=metadata.seq_lens[end:].clone(),
            num_decodes=0,
        )
    return UncachedPrefillMetadata(
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.num_decodes,
        metadata.max_query_len,
        metadata.max_seq_len,
        fixed_order=metadata.fixed_order,
        window=metadata.window,
        decode_query_len=metadata.decode_query_len,
        prompt_lens=prompt_lens,
        decodes=decodes,
        others=others,
    )
