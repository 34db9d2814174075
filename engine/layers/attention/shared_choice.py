"""Shares the choice of an indexer among tensor-parallel ranks, where each would make all of it.

    tokens of a step    | 0 | 1 | 1 | 0 | 0 | 1 | 1 | 0 |    runs, by the rank that chooses for them
    rank 0 scores       | 0 | 0 | 0 | 0 |                    and gathers what all have chosen

Every rank has all keys and all queries, so a rank that chooses for some of the tokens needs nothing
of the others; what is chosen for a token depends on it and on its context alone, and is the same
whichever rank does it. Behind a prompt's later tokens there is more to score: the order of ranks
turns from run to run, so all have as much to do. A run of requests' tokens is a batch of its own,
made on the device, so that steps with a shared choice can be recorded.

What is gathered is `top_k` numbers of 4 bytes for each token. Decodes are too few for that, and so
are short steps: there each rank chooses for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.parallel.distributed import ParallelGroup
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.device import is_gpu

_RUNS = 4
"""Runs of one rank."""
_FEWEST_TOKENS = {True: 512, False: 16}
_FEWEST_PAIRS = {True: 1 << 25, False: 1 << 9}
"""Steps of fewer tokens, or of fewer pairs of a token and a key, are not shared: on a GPU, and on a
CPU. Two H200s choose in 0.8 of the time at 67 million pairs and in 0.56 at 268 million; at 8 they
save 30 us, which their host spends on launches."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """Says for which tokens of a batch one rank chooses.

    Attributes:
        batch, num_tokens: The whole batch.
        rows: [N] int64, the tokens of the share; behind the last real one it stands again.
        metadata: The share as a batch: each request once for each run, mostly without a token.
        order: [runs of all ranks] int64, where the runs stand in what is gathered.
    """

    batch: AttentionMetadata
    num_tokens: int
    rows: Tensor
    metadata: AttentionMetadata
    order: Tensor

    @classmethod
    def of(cls, batch: AttentionMetadata, num_tokens: int, rank: int, size: int) -> RankShare:
        """Returns the share of a rank in `num_tokens` tokens."""
        device = batch.seq_lens.device
        length = -(-num_tokens // (size * _RUNS))
        turns = torch.arange(_RUNS, device=device)
        first = (turns * size + _turned(turns, torch.full_like(turns, rank), size)) * length
        rows = first[:, None] + torch.arange(length, device=device)
        runs = torch.arange(size * _RUNS, device=device)
        turn = runs // size
        return cls(
            batch,
            num_tokens,
            rows.clamp(max=num_tokens - 1).flatten(),
            _of_runs(batch, first, length),
            _turned(turn, runs % size, size) * _RUNS + turn,
        )


def _turned(turns: Tensor, ranks: Tensor, size: int) -> Tensor:
    """Returns the places of ranks in turns, or the ranks of places: every other turn goes back."""
    return torch.where(turns % 2 == 0, ranks, size - 1 - ranks)


def _of_runs(batch: AttentionMetadata, first: Tensor, length: int) -> AttentionMetadata:
    """Returns the runs of `length` tokens from `first` on as one batch. Behind the requests of each
    run is one without a context, which has the tokens that are padding."""
    count = len(first)
    start, end = first[:, None], first[:, None] + length
    bounds = batch.query_start_loc.long()
    own = torch.arange(count, device=first.device)[:, None] * length
    starts = own + (torch.clamp(bounds, start, end) - start)
    ends = bounds[1:]
    behind = ends - torch.minimum(ends, end)
    seq_lens = torch.clamp(batch.seq_lens - behind, min=0)
    seq_lens = torch.cat((seq_lens, seq_lens.new_zeros(count, 1)), dim=1)
    tables = torch.cat((batch.block_tables, batch.block_tables[:1]))
    return replace(
        batch,
        block_tables=tables.repeat(count, 1),
        query_start_loc=torch.cat((starts.flatten(), starts.new_full((1,), count * length))).int(),
        seq_lens=seq_lens.flatten().int(),
        num_decodes=0,
        max_query_len=length,
        hidden=None,
    )


@dataclass(slots=True)
class RankShares:
    """Keeps the shares of a pass, which its layers have in common."""

    found: dict[int, RankShare] = field(default_factory=dict)

    def of(self, batch: AttentionMetadata, num_tokens: int, group: ParallelGroup) -> RankShare:
        share = self.found.get(id(batch))
        if share is None:
            share = RankShare.of(batch, num_tokens, group.rank, group.size)
            self.found[id(batch)] = share  # It has the batch: nothing else gets that id.
        return share


@dataclass(frozen=True, slots=True)
class SharedChoice:
    """Chooses for the tokens of a step, with the other ranks where that takes less time.

    Attributes:
        group: The ranks, all of which have the same tokens and keys.
        top_k, tokens: See `tandem_kernels.reference.index.index_topk`.
    """

    group: ParallelGroup
    top_k: int
    tokens: int = 1

    def choose(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: IndexPages,
        metadata: AttentionMetadata,
        shares: RankShares,
    ) -> Tensor:
        """Returns what `index_topk` does of the same, [T, top_k] int32, for queries [T, H, D] and
        weights [T, H]."""
        num_tokens = len(queries)
        if not self.is_shared(num_tokens, metadata, queries.device):
            return self._chosen(queries, weights, pages, metadata)
        share = shares.of(metadata, num_tokens, self.group)
        own = queries.view(torch.uint8).index_select(0, share.rows).view(queries.dtype)
        return self.choose_together(own, weights.index_select(0, share.rows), pages, share)

    def choose_together(
        self, queries: Tensor, weights: Tensor, pages: IndexPages, share: RankShare
    ) -> Tensor:
        """Returns what is chosen for all tokens of the share's batch, [T, top_k] int32; this rank
        chooses for its own, with queries [N, H, D] and weights [N, H]."""
        own = self._chosen(queries, weights, pages, share.metadata)
        runs = self.group.gather_rows(own).view(len(share.order), -1)
        return runs.index_select(0, share.order).view(-1, self.top_k)[: share.num_tokens]

    def is_shared(self, num_tokens: int, metadata: AttentionMetadata, device: torch.device) -> bool:
        """Returns whether ranks share a choice: by shapes alone, for all must agree, and what is
        recorded must be what is replayed."""
        if self.group.size == 1:
            return False
        on_gpu = is_gpu(device)
        pairs = num_tokens * (metadata.max_seq_len // self.tokens)
        return num_tokens >= _FEWEST_TOKENS[on_gpu] and pairs >= _FEWEST_PAIRS[on_gpu]

    def _chosen(
        self, queries: Tensor, weights: Tensor, pages: IndexPages, metadata: AttentionMetadata
    ) -> Tensor:
        return ops.index_topk(queries, weights, pages, metadata, self.top_k, self.tokens)
