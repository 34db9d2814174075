"""What one attention call needs to know about the step's requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Ragged batch of R requests over a paged KV cache.

    The first `num_decodes` requests have exactly one query token each. A request's query tokens
    are the last of its context: query token i of request r sits at position
    `seq_lens[r] - query_len[r] + i` and sees everything up to and including itself.

    Attributes:
        block_tables: [R, max_blocks] int32, block ids of each request in logical order. Entries
            beyond `ceil(seq_len / block_size)` are never read.
        query_start_loc: [R + 1] int32, request r owns query rows
            `query_start_loc[r] : query_start_loc[r + 1]`.
        seq_lens: [R] int32, context length including this step's tokens. 0 marks a padding row.
        num_decodes: Leading requests with exactly one query token.
        max_query_len: Upper bound of the query lengths, known on the host.
        max_seq_len: Upper bound of `seq_lens`, known on the host.
        whole_prompt_lens: Query lengths of the requests behind the decodes, if they are prompts
            without a cached beginning that may be attended apart. Kernels need not look at it.
        fixed_order: What a query token attends to is added up in one order, whatever else is in
            the batch, and however its request's tokens are cut into steps.
    """

    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    whole_prompt_lens: tuple[int, ...] = ()
    fixed_order: bool = False

    @property
    def whole_prompts_end(self) -> int:
        """The query row behind the whole prompts."""
        return self.num_decodes + sum(self.whole_prompt_lens)

    def decodes(self) -> AttentionMetadata:
        """The decodes alone."""
        return replace(
            self,
            block_tables=self.block_tables[: self.num_decodes],
            query_start_loc=self.query_start_loc[: self.num_decodes + 1],
            seq_lens=self.seq_lens[: self.num_decodes],
            max_query_len=1,
            whole_prompt_lens=(),
        )

    def behind_whole_prompts(self) -> AttentionMetadata:
        """The other requests, without the decodes; their query rows count from
        `whole_prompts_end`. Copies, because kernels are compiled by how addresses are aligned."""
        first = self.num_decodes + len(self.whole_prompt_lens)
        return replace(
            self,
            block_tables=self.block_tables[first:].clone(),
            query_start_loc=self.query_start_loc[first:] - self.whole_prompts_end,
            seq_lens=self.seq_lens[first:].clone(),
            num_decodes=0,
            whole_prompt_lens=(),
        )
