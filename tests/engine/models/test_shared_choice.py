"""The choice of an indexer that ranks share is the one that each would make alone. Parity with
transformers on two ranks, of every sparse family and in chunks, goes through it as well."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engine.layers.attention.shared_choice import RankShare, RankShares, SharedChoice
from engine.parallel.distributed import ParallelGroup
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.device import KNOWN_GPUS, as_on
from tests.engine.parallel.collective_scenes import play

TOP_K, BLOCK_SIZE = 12, 16
BATCHES = {
    "one prompt": ([70], [70]),
    "a chunk behind a context": ([300], [41]),
    "decodes before prompts": ([40, 9, 120, 33], [1, 1, 60, 33]),
    "padding": ([5, 90, 0, 0], [1, 40, 3, 0]),
}


def batch_of(seq_lens: list[int], query_lens: list[int]) -> AttentionMetadata:
    num_blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
    tables = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    for table, own in zip(tables, torch.randperm(sum(num_blocks)).split(num_blocks), strict=True):
        table[: len(own)] = own
    bounds = torch.tensor([0, *query_lens]).cumsum(0).int()
    longest = max(query_lens), max(seq_lens)
    # In fixed order the reference computes each token by itself: bits are the same in any batch.
    return AttentionMetadata(
        tables, bounds, torch.tensor(seq_lens).int(), 0, *longest, fixed_order=True
    )


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_ranks_choose_together_what_each_would_alone(batch: str, tokens: int) -> None:
    torch.manual_seed(3)
    metadata = batch_of(*BATCHES[batch])
    count = int(metadata.query_start_loc[-1])
    pages = IndexPages(torch.randn(int(metadata.block_tables.max()) + 1, BLOCK_SIZE, 16).round())
    queries, weights = torch.randn(count, 3, 16).round(), torch.randn(count, 3)
    inputs = queries, weights, pages, metadata
    alone = ops.index_topk(*inputs, TOP_K, tokens)

    def scene(group: ParallelGroup) -> torch.Tensor:
        choice = SharedChoice(group, TOP_K, tokens)
        assert choice.is_shared(count, metadata, queries.device)
        shares = RankShares()
        found = choice.choose(*inputs, shares)
        (share,) = shares.found.values()
        assert torch.equal(choice.choose(*inputs, shares), found)
        assert list(shares.found.values()) == [share], "layers share it"
        group.close()
        return found

    for size in (2, 3):
        for found in play(scene, size):
            assert torch.equal(found, alone)


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_have_as_much_to_score(size: int) -> None:
    """A prompt's last token sees most. Each token is of one rank."""
    count = 4000
    metadata = batch_of([count], [count])
    shares = [RankShare.of(metadata, count, rank, size) for rank in range(size)]
    assert sorted({*torch.cat([share.rows for share in shares]).tolist()}) == [*range(count)]
    pairs = []
    for share in shares:
        bounds = share.metadata.query_start_loc.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        pairs.append(sum(
            max(0, count * (2 * seen - count + 1) // 2)
            for count, seen in zip(lengths, share.metadata.seq_lens.tolist(), strict=True)
        ))  # fmt: skip
        assert bounds[-1] == len(share.rows) == -(-count // (4 * size)) * 4
    assert sum(pairs) == count * (count + 1) // 2
    assert max(pairs) < 1.01 * min(pairs)


@pytest.mark.parametrize(
    ("size", "num_tokens", "context", "shares"),
    [
        (1, 8192, 32_768, False),
        (2, 8192, 4096, True),
        (2, 2048, 16_384, True),
        (2, 2048, 16_000, False),  # scored sooner than gathered
        (8, 512, 65_536, True),
        (8, 511, 131_072, False),  # as decodes are: a recorded step may be anything
        (8, 64, 131_072, False),
    ],
)
def test_few_tokens_are_chosen_for_by_every_rank(
    size: int, num_tokens: int, context: int, shares: bool
) -> None:
    group = ParallelGroup(0, 1)
    group.size = size
    metadata = batch_of([context], [num_tokens])
    with as_on(KNOWN_GPUS["h200"]):
        found = SharedChoice(group, 2048).is_shared(num_tokens, metadata, torch.device("cpu"))
    assert found == shares
