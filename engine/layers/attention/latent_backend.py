"""The choice between the two forms of latent attention, request by request.

    query rows   0 .............. first ................ end ........ T
                 |  absorbed     |  expanded            |  absorbed  |
                 |  decodes,     |  long chunks         |  short     |
                 |  short chunks |                      |  chunks    |

Absorbed, a query attends to the cache as it is, to vectors of 2 L + R numbers instead of P + R + V.
Expanded, each token of the context first becomes a key and a value of each head, which costs
L (P + V) products. A chunk of n tokens behind c cached ones has n c + n² / 2 pairs of tokens, so
expansion is worth while where

    (n c + n² / 2) (2 L - P - V)  >  c L (P + V)

that is, for DeepSeek's sizes, from 171 tokens on behind a long context, and from fewer behind a
short one; a chunk's own tokens cost the same either way. Steps of few tokens stay absorbed: they
may be recorded. Source: the absorbed form is DeepSeek-V2's (arXiv 2405.04434, 2.1.2).

Where an indexer chooses what is attended, each query has rows of its own, and reading them takes
longer than products of short contexts do: there chunks are expanded, too, and what is not chosen
is masked. How long a context may be is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from engine.layers.attention.backend import PrefillChunk, StepBatch, StepOrder
from engine.layers.attention.context_passes import (
    PASS_TOKENS,
    ContextPass,
    RaggedKernel,
    context_passes,
)
from engine.layers.attention.paged import PagedBackend
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.attention.ragged_batch import RaggedBatch

_FEWEST_TOKENS = 64
"""Shorter chunks stay absorbed: a launch more would cost what they save."""
_FEWEST_OF_STEP = 513
"""A step with fewer tokens to expand stays absorbed, so that it may be a recorded one."""


class LatentShape(Protocol):
    """The sizes of latent attention; see `LatentSizes`."""

    @property
    def kv_rank(self) -> int: ...
    @property
    def nope(self) -> int: ...
    @property
    def rope(self) -> int: ...
    @property
    def value(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LatentMetadata(AttentionMetadata):
    """A step's metadata, and its parts.

    Attributes:
        rows: Query rows that are expanded.
        passes: What they attend to; the first one is causal and has all of them.
        before, after: The requests around them, whose query rows count from 0 and from the end of
            `rows`. None: there are none.
        choosing: Those that are expanded, where they attend to chosen tokens; None: to all.
    """

    rows: slice = field(default_factory=lambda: slice(0))
    passes: tuple[ContextPass, ...] = ()
    before: AttentionMetadata | None = None
    after: AttentionMetadata | None = None
    choosing: AttentionMetadata | None = None


@dataclass(frozen=True, slots=True)
class LatentBackend(PagedBackend):
    """Attends to latents.

    Attributes:
        shape: Of the model; None: all requests stay absorbed.
        ragged: Attends to expanded keys and values.
        pass_tokens: Of contexts expanded at once.
        fewest_tokens, fewest_of_step: Of a chunk, and of all that a step expands.
        dense_tokens: Of longer contexts an indexer chooses.
        masked_tokens: Contexts of no more are expanded all the same, and what is not chosen masked.
    """

    shape: LatentShape | None = None
    ragged: RaggedKernel = ops.ragged_attention
    pass_tokens: int = PASS_TOKENS
    fewest_tokens: int = _FEWEST_TOKENS
    fewest_of_step: int = _FEWEST_OF_STEP
    masked_tokens: int = 0

    @property
    def expands_contexts(self) -> bool:
        return self.shape is not None

    def prepare(
        self, num_heads: int, kv_cache: PagedKV, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """Loads the kernels of a library onto the device: any length has the same. Arguments as
        in `AttentionBackend.prepare`; `kv_cache` is [N, 1, 1, B, L + R]."""
        if self.shape is None:
            return
        key, value = self.shape.nope + self.shape.rope, self.shape.value
        q, k, v = (
            torch.zeros((self.fewest_of_step, num_heads, size), dtype=dtype).to(kv_cache.device)
            for size in (key, key, value)
        )
        bounds = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        for causal in (False, True):
            batch = RaggedBatch(bounds, bounds, len(q), len(q), causal)
            attended, log_sums = self.ragged(q, k, v, batch, 1.0)
        ops.merge_attention(attended, log_sums, attended.clone(), log_sums.clone())

    def order(self, chunks: list[PrefillChunk]) -> list[PrefillChunk]:
        """Orders those to expand last; chunks of a kind stay as they came."""
        return sorted(chunks, key=self._is_expanded)

    def graph_ok(self, order: StepOrder) -> bool:
        """Returns whether the step is absorbed, as recorded ones of few tokens are, or has whole
        prompts alone, as those of many have."""
        if self.shape is None or int(order.query_lens.sum()) < self.fewest_of_step:
            return True
        return self._has_whole_prompts(order)

    def metadata(self, batch: StepBatch) -> AttentionMetadata:
        metadata = PagedBackend.metadata(self, batch)
        if self._has_whole_prompts(batch.order):
            return self._of_whole_prompts(batch, metadata)
        first, end = self._expanded(batch.order)
        if first == end:
            return metadata
        query_lens = batch.order.query_lens
        begin, stop = int(query_lens[:first].sum()), int(query_lens[:end].sum())
        chunks = _chunks(batch.order)[first - batch.order.num_decodes :][: end - first]
        tables = batch.block_tables[first:end]
        before, after = around(metadata, query_lens.tolist(), first, end)
        choosing = None
        if not self._is_dense(int(batch.order.seq_lens[first:end].max())):
            choosing = _part(metadata, query_lens.tolist(), first, end)
        return LatentMetadata(
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.num_decodes,
            metadata.max_query_len,
            metadata.max_seq_len,
            decode_query_len=metadata.decode_query_len,
            rows=slice(begin, stop),
            passes=context_passes(chunks, tables, self.pass_tokens),
            before=before,
            after=after,
            choosing=choosing,
        )

    def _may_record(self, order: StepOrder) -> bool:
        if self.shape is None:  # Any step is absorbed, and chunks behind contexts have graphs.
            return PagedBackend._may_record(self, order)
        is_small = int(order.query_lens.sum()) < self.fewest_of_step
        return is_small or order.num_decodes == len(order.query_lens)

    def _has_whole_prompts(self, order: StepOrder) -> bool:
        """Returns whether all that the step computes are many tokens of prompts from their
        beginnings, which are attended as a whole. Short ones are expanded with the others. A graph
        is recorded with one prompt that may be too long for that, and replayed with none."""
        return (
            self.shape is not None
            and order.num_decodes == 0
            and int(order.query_lens.sum()) >= self.fewest_of_step
            and bool((order.query_lens == order.seq_lens).all())
            and (order.is_recorded or self._is_dense(int(order.seq_lens.max())))
        )

    def _is_dense(self, num_tokens: int) -> bool:
        """Returns whether a context of `num_tokens` is attended as a whole."""
        return self.dense_tokens is None or num_tokens <= self.dense_tokens

    def _may_expand(self, num_tokens: int) -> bool:
        """Returns whether a context of `num_tokens` may be expanded, as a whole or masked."""
        return self._is_dense(num_tokens) or num_tokens <= self.masked_tokens

    def _of_whole_prompts(self, batch: StepBatch, metadata: AttentionMetadata) -> LatentMetadata:
        """Returns metadata that says nothing of the prompts' lengths but on the device, for a
        recorded step has others each time."""
        num_tokens = int(batch.order.query_lens.sum())
        longest = metadata.max_query_len
        if num_tokens <= self.recorded_tokens:
            longest = num_tokens
        bounds = batch.query_start_loc
        rows = slice(0, num_tokens)
        whole = ContextPass(
            rows,
            batch.block_tables,
            torch.zeros_like(batch.seq_lens),
            num_tokens,
            RaggedBatch(bounds, bounds, longest, longest, causal=True),
        )
        return LatentMetadata(
            metadata.block_tables,
            bounds,
            metadata.seq_lens,
            0,
            longest,
            metadata.max_seq_len,
            rows=rows,
            passes=(whole,),
        )

    def _is_expanded(self, chunk: PrefillChunk) -> bool:
        """Returns whether a chunk alone is worth expanding its context."""
        shape = self.shape
        if shape is None or self.fixed_order or chunk.num_tokens < self.fewest_tokens:
            return False
        new, cached = chunk.num_tokens, chunk.num_computed
        if not self._may_expand(new + cached):
            return False
        pairs = new * cached + new * new / 2
        saved = 2 * shape.kv_rank - shape.nope - shape.value
        return pairs * saved > cached * shape.kv_rank * (shape.nope + shape.value)

    def _expanded(self, order: StepOrder) -> tuple[int, int]:
        """Returns the first request that is expanded and the one behind the last. Those between,
        if any, are not worth it and rare."""
        chosen = [
            order.num_decodes + index
            for index, chunk in enumerate(_chunks(order))
            if self._is_expanded(chunk)
        ]
        if not chosen:
            return 0, 0
        first, end = chosen[0], chosen[-1] + 1
        if not self._may_expand(int(order.seq_lens[first:end].max())):
            return 0, 0
        if int(order.query_lens[first:end].sum()) < self.fewest_of_step:
            return 0, 0
        return first, end


def _chunks(order: StepOrder) -> list[PrefillChunk]:
    """Returns the requests behind the decodes; their rows are not known."""
    first = order.num_decodes
    query_lens, seq_lens = order.query_lens[first:].tolist(), order.seq_lens[first:].tolist()
    return [
        PrefillChunk(-1, query_len, seq_len - query_len)
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
    ]


def around(
    metadata: AttentionMetadata, query_lens: list[int], first: int, end: int
) -> tuple[AttentionMetadata | None, AttentionMetadata | None]:
    """Returns the parts of `metadata` before request `first` and from request `end` on."""
    before = after = None
    if first > 0:
        before = replace(
            metadata,
            block_tables=metadata.block_tables[:first],
            query_start_loc=metadata.query_start_loc[: first + 1],
            seq_lens=metadata.seq_lens[:first],
            max_query_len=max(query_lens[:first]),
        )
    if end < len(query_lens):
        after = _part(metadata, query_lens, end, len(query_lens))
    return before, after


def _part(
    metadata: AttentionMetadata, query_lens: list[int], first: int, end: int
) -> AttentionMetadata:
    """Returns requests [first, end), none of which decodes, as a step of their own."""
    # Copies, because kernels are compiled by how addresses are aligned.
    return replace(
        metadata,
        block_tables=metadata.block_tables[first:end].clone(),
        query_start_loc=metadata.query_start_loc[first : end + 1] - sum(query_lens[:first]),
        seq_lens=metadata.seq_lens[first:end].clone(),
        num_decodes=0,
        max_query_len=max(query_lens[first:end]),
    )
