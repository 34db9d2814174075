"""Long prompts are attended by a library whose kernels are faster than ours there, but cannot read
pages: uncached ones straight from the projection, chunks behind cached tokens with a copy of their
context.

    query rows   0 ........ num_decodes ...... ........................ end ............. T
                 |  decodes |  uncached prompts |  chunks behind cached  |  other chunks   |
                 |  paged   |  `DensePrefill`   |  its `ragged`, copies  |  paged          |

Long uncached prompts come first among those that end, and first among those that leave a rest, and
long chunks behind them; the ones that lie together behind the decodes are attended apart. Layers
with a window are paged: little of a prompt is seen through it.

A copy of n tokens moves as many bytes as n / 40 queries need the time of, so chunks of `min_tokens`
pay for theirs whatever their context.
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


@dataclass(frozen=True, slots=True)
class UncachedPrefillMetadata(AttentionMetadata):
    """A step's metadata, and its parts.

    Attributes:
        prompt_lens: Query lengths of the uncached prompts behind the decodes.
        chunk_lens: Those of the chunks behind these.
        passes: What the chunks attend to; the first one is causal and has all of them.
        decodes: The decodes alone; None: there are none.
        others: The requests behind those; their query rows count from `end`. None: there are none.
    """

    prompt_lens: tuple[int, ...] = ()
    chunk_lens: tuple[int, ...] = ()
    passes: tuple[ContextPass, ...] = ()
    decodes: AttentionMetadata | None = None
    others: AttentionMetadata | None = None

    @property
    def chunk_rows(self) -> slice:
        """Returns the query rows of the chunks."""
        start = self.num_decode_tokens + sum(self.prompt_lens)
        return slice(start, start + sum(self.chunk_lens))

    @property
    def end(self) -> int:
        """Returns the query row behind all that is attended apart."""
        return self.num_decode_tokens + sum(self.prompt_lens) + sum(self.chunk_lens)


class DensePrefill(ABC):
    """The kernels of a library, for uncached prompts.

    Attributes:
        name: In logs.
        min_tokens: Shorter prompts take less time together with the rest of the batch.
        has_sinks: It computes `AttentionSpec.sinks`.
        ragged: Attends to more keys than there are queries, so that chunks behind cached tokens are
            its, too; None: it does not.
    """

    name: str
    min_tokens: int
    has_sinks: ClassVar[bool] = False
    ragged: RaggedKernel | None = None

    @abstractmethod
    def attend(
        self, spec: AttentionSpec, heads: Tensor, metadata: UncachedPrefillMetadata
    ) -> Tensor:
        """Computes causal attention of the prompts in `metadata.prompt_lens`.

        Args:
            heads: As `AttentionBackend.attend` is given them, of the whole batch.

        Returns:
            [T, Hq, Dv], whose rows of other requests are anything.
        """

    @abstractmethod
    def prepare(
        self, num_heads: int, kv_cache: PagedKV, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """Prepares as `AttentionBackend.prepare` says; `kv_cache` is [N, 2, Hkv, B, D]."""


@dataclass(frozen=True, slots=True)
class UncachedPrefillBackend(AttentionBackend):
    """Attends to long uncached prompts by `dense`, and to all others by `paged`.

    Attributes:
        recorded_tokens: Steps of no more tokens are all `paged`, because they may be recorded.
        pass_tokens: Of contexts that are copied at once.
    """

    dense: DensePrefill
    paged: PagedBackend = field(default_factory=PagedBackend)
    recorded_tokens: int = 0
    pass_tokens: int = PASS_TOKENS

    @property
    def expands_contexts(self) -> bool:
        return self.dense.ragged is not None

    def prepare(
        self, num_heads: int, kv_cache: PagedKV, dtype: torch.dtype, max_tokens: int
    ) -> None:
        self.dense.prepare(num_heads, kv_cache, dtype, max_tokens)

    def order(self, chunks: list[PrefillChunk]) -> list[PrefillChunk]:
        """Orders long uncached prompts first, then long chunks; the others stay as they came."""
        return sorted(chunks, key=self._place)

    def graph_ok(self, order: StepOrder) -> bool:
        return not any(self._apart(order))

    def metadata(self, batch: StepBatch) -> AttentionMetadata:
        metadata = self.paged.metadata(batch)
        if batch.window is not None:
            return metadata
        prompts, chunks = self._apart(batch.order)
        if not prompts and not chunks:
            return metadata
        first = metadata.num_decodes + len(prompts)
        passes: tuple[ContextPass, ...] = ()
        if chunks:
            tables = metadata.block_tables[first : first + len(chunks)]
            passes = context_passes(chunks, tables, self.pass_tokens)
        prompt_lens = tuple(prompt.num_tokens for prompt in prompts)
        return split_metadata(
            metadata, prompt_lens, tuple(chunk.num_tokens for chunk in chunks), passes
        )

    def reads_new_keys(self, metadata: AttentionMetadata) -> bool:
        return isinstance(metadata, UncachedPrefillMetadata) and bool(metadata.prompt_lens)

    def attend(
        self, spec: AttentionSpec, heads: Tensor, kv_cache: PagedKV, metadata: AttentionMetadata
    ) -> Tensor:
        if not isinstance(metadata, UncachedPrefillMetadata):
            return self.paged.attend(spec, heads, kv_cache, metadata)
        rows = metadata.chunk_rows
        if rows == slice(0, len(heads)):
            return self._copied(spec, spec.queries(heads), kv_cache, metadata.passes)
        if metadata.prompt_lens:
            attended = self.dense.attend(spec, heads, metadata)
        else:
            attended = heads.new_empty(len(heads), spec.num_heads, spec.value_dim)
        first, end = metadata.num_decode_tokens, metadata.end
        if metadata.decodes is not None:
            attended[:first] = self.paged.attend(spec, heads[:first], kv_cache, metadata.decodes)
        if metadata.passes:
            queries = spec.queries(heads[rows])
            attended[rows] = self._copied(spec, queries, kv_cache, metadata.passes)
        if metadata.others is not None:
            attended[end:] = self.paged.attend(spec, heads[end:], kv_cache, metadata.others)
        return attended

    def _copied(
        self, spec: AttentionSpec, q: Tensor, kv_cache: PagedKV, passes: tuple[ContextPass, ...]
    ) -> Tensor:
        """Attends to copies of contexts: [T, Hq, D] -> [T, Hq, Dv]."""
        ragged = self.dense.ragged
        assert ragged is not None, "only then are there passes"
        joined: tuple[Tensor, Tensor] | None = None
        for part in passes:
            keys, values = ops.gather_context(
                kv_cache, part.block_tables, part.first, part.batch.key_bounds, part.num_keys,
                q.dtype, spec.kv_scales,
            )  # fmt: skip
            found = ragged(q[part.rows], keys, values, part.batch, spec.scale)
            if joined is None:
                joined = found
            else:
                attended, log_sums = joined
                ops.merge_attention(attended[part.rows], log_sums[:, part.rows], *found)
        assert joined is not None
        attended, log_sums = joined
        if spec.sinks is not None:
            ops.add_sinks(attended, log_sums, spec.sinks)
        return attended

    def _place(self, chunk: PrefillChunk) -> int:
        """Returns 0 for long uncached prompts, 1 for long chunks that are attended apart, 2 for
        all others."""
        if chunk.num_tokens < self.dense.min_tokens:
            return 2
        if chunk.num_computed == 0:
            return 0
        return 1 if self.dense.ragged is not None else 2

    def _apart(self, order: StepOrder) -> tuple[list[PrefillChunk], list[PrefillChunk]]:
        """Returns long uncached prompts and long chunks that lie together behind the decodes; their
        rows are not known."""
        found: tuple[list[PrefillChunk], list[PrefillChunk]] = [], []
        if int(order.query_lens.sum()) <= self.recorded_tokens:
            return found
        first, last = order.num_decodes, 0
        query_lens, seq_lens = order.query_lens[first:].tolist(), order.seq_lens[first:].tolist()
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            chunk = PrefillChunk(-1, query_len, seq_len - query_len)
            place = self._place(chunk)
            if place < last or place == 2:
                break
            found[place].append(chunk)
            last = place
        return found


def split_metadata(
    metadata: AttentionMetadata,
    prompt_lens: tuple[int, ...],
    chunk_lens: tuple[int, ...] = (),
    passes: tuple[ContextPass, ...] = (),
) -> UncachedPrefillMetadata:
    """Returns `metadata` with the parts that lie around `prompt_lens` and `chunk_lens`, one of
    which is not empty."""
    first = metadata.num_decodes
    end = first + len(prompt_lens) + len(chunk_lens)
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
            - (metadata.num_decode_tokens + sum(prompt_lens) + sum(chunk_lens)),
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
        chunk_lens=chunk_lens,
        passes=passes,
        decodes=decodes,
        others=others,
    )
