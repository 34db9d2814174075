"""Attention of all requests alike, over the pages of the cache. Source: Kwon et al., PagedAttention
(arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.layers.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    StepBatch,
    StepOrder,
)
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata, HiddenDecodes
from tandem_kernels.attention.kv_pages import PagedKV

PagedKernel = Callable[..., Tensor]
"""See `tandem_kernels.reference.attention.paged_attention`; not all have its soft bound, its
sinks and its FP8 caches."""


@dataclass(frozen=True, slots=True)
class PagedBackend(AttentionBackend):
    """Attends by one paged kernel.

    Attributes:
        kernel: Our own, or another's with the same meaning.
        fixed_order: See `AttentionMetadata`.
        recorded_tokens: Steps of no more tokens may be recorded.
        dense_tokens: An indexer chooses what is attended of a longer context; None: there is none.
        recorded_context: The longest context of a recorded step, whatever the contexts are that it
            is recorded with; 0: nothing is recorded.
    """

    kernel: PagedKernel = ops.paged_attention
    fixed_order: bool = False
    recorded_tokens: int = 0
    dense_tokens: int | None = None
    recorded_context: int = 0

    def metadata(self, batch: StepBatch) -> AttentionMetadata:
        return AttentionMetadata(
            block_tables=batch.block_tables,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_decodes=batch.order.num_decodes,
            max_query_len=_longest_query(batch.order),
            max_seq_len=self._longest(batch.order),
            fixed_order=self.fixed_order,
            window=batch.window,
            decode_query_len=batch.order.decode_query_len,
            hidden=self._hidden(batch),
            usual_seq_len=self._usual(batch.order),
        )

    def _hidden(self, batch: StepBatch) -> HiddenDecodes | None:
        """Returns the decodes that are attended apart: not in fixed order, and through a window
        little is seen."""
        if self.fixed_order or batch.window is not None or not batch.order.hides_decodes:
            return None
        return HiddenDecodes.of(batch.query_start_loc, batch.seq_lens)

    def _longest(self, order: StepOrder) -> int:
        """Returns the longest context of a step. Of a recorded one it may be any; so it is of those
        that may be recorded, where an indexer chooses by it."""
        chooses = self.dense_tokens is not None and self._may_record(order)
        if self.recorded_context and (order.is_recorded or chooses):
            return self.recorded_context
        return int(order.seq_lens.max())

    def _usual(self, order: StepOrder) -> int:
        """Returns `AttentionMetadata.usual_seq_len`: that of the recorded requests."""
        chooses = self.dense_tokens is not None
        return int(order.seq_lens.max()) if order.is_recorded and not chooses else 0

    def _may_record(self, order: StepOrder) -> bool:
        is_small = int(order.query_lens.sum()) <= self.recorded_tokens
        return is_small or order.num_decodes == len(order.query_lens)

    def attend(
        self, spec: AttentionSpec, heads: Tensor, kv_cache: PagedKV, metadata: AttentionMetadata
    ) -> Tensor:
        queries = spec.queries(heads)
        rare: dict[str, Any] = {"softcap": spec.softcap} if spec.softcap else {}
        if spec.sinks is not None:
            rare["sinks"] = spec.sinks
        if spec.kv_scales is not None:
            rare["kv_scales"] = spec.kv_scales
        return self.kernel(queries, kv_cache, metadata, spec.scale, **rare)


def _longest_query(order: StepOrder) -> int:
    """Returns the most query tokens of a request. Of a recorded step with prompts one may have all:
    padding has none."""
    is_any = order.is_recorded and order.num_decodes == 0
    return int(order.query_lens.sum() if is_any else order.query_lens.max())
