"""Describes a step's requests to one attention call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_kernels.attention.kv_pages import PagedKV, sizes_of, strides_of


@dataclass(frozen=True, slots=True)
class HiddenDecodes:
    """Tells on the device alone which requests of a recorded step decode: the first ones, of one
    token each. Another number of them does so in each step.

    Attributes:
        seq_lens: [R] int32, context lengths of those that decode, 0 of all others.
        query_start_loc: [R + 1] int32, of the others: those that decode own no query rows.
    """

    seq_lens: Tensor
    query_start_loc: Tensor

    @classmethod
    def of(cls, query_start_loc: Tensor, seq_lens: Tensor) -> HiddenDecodes:
        """Finds them. A request whose place is that of its only token decodes, if all before it do;
        padding has no context."""
        places = torch.arange(1, len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        decodes = (query_start_loc[1:] == places).int().cumprod(0, dtype=torch.int32)
        count = decodes.sum(dtype=torch.int32)
        return cls(seq_lens * decodes, torch.maximum(query_start_loc, count))


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Ragged batch of R requests over a paged KV cache.

    The first `num_decodes` requests have exactly `decode_query_len` query tokens each. A request's
    query tokens are the last of its context: query token i of request r sits at position
    `seq_lens[r] - query_len[r] + i` and sees everything up to and including itself, or with a
    window the last `window` positions of that.

    Attributes:
        block_tables: [R, max_blocks] int32, block ids of each request in logical order. Entries
            beyond `ceil(seq_len / block_size)` are never read; before a window they name any block
            of the cache, whose content is never used.
        query_start_loc: [R + 1] int32, request r owns query rows
            `query_start_loc[r] : query_start_loc[r + 1]`.
        seq_lens: [R] int32, context length including this step's tokens. 0 marks a padding row.
        num_decodes: Leading requests that decode.
        max_query_len: Upper bound of the query lengths, known on the host.
        max_seq_len: Upper bound of `seq_lens`, known on the host: of a recorded step, that of all
            steps it is replayed as.
        fixed_order: What a query token attends to is added up in one order, whatever else is in
            the batch, and however its request's tokens are cut into steps.
        window: Positions that a query token sees at most, its own included; None: all.
        decode_query_len: Query tokens of each decode: its last token, and drafts behind it.
        hidden: Decodes that `num_decodes` does not count; None: there are none, or their contexts
            are short enough to be attended like those of prompts.
        usual_seq_len: The context that tiles are chosen for; 0: `max_seq_len`, which in a recorded
            step is longer than most.
    """

    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    fixed_order: bool = False
    window: int | None = None
    decode_query_len: int = 1
    hidden: HiddenDecodes | None = None
    usual_seq_len: int = 0

    @property
    def num_decode_tokens(self) -> int:
        """Returns the number of leading query rows that belong to decodes."""
        return self.num_decodes * self.decode_query_len

    @property
    def uniform_query_len(self) -> int:
        """Returns the query tokens of each request where all decode; 0: they may differ."""
        return self.decode_query_len if self.num_decodes == self.seq_lens.shape[0] else 0

    def longest_context(self, kv_cache: PagedKV) -> int:
        """Returns the tokens that a block table has room for: a recorded step may be replayed
        behind contexts of any length up to that."""
        return self.block_tables.shape[1] * sizes_of(kv_cache).block_size

    def strides(self, q: Tensor, kv_cache: PagedKV) -> tuple[int, ...]:
        """Returns the steps from a token of `q` to the next, those of `kv_pages.strides_of`, and
        from a block table to the next."""
        return q.stride(0), *strides_of(kv_cache), self.block_tables.stride(0)
