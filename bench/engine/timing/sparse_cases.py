"""Sparse attention over latents at the shapes of DeepSeek V3.2: an indexer of 64 heads of 128, of
whose scores the highest 2048 are chosen, and latents of 512 + 64 in blocks of 64 tokens. Attention
to blocks at those of MiniMax-M3: 4 KV heads of 128 with 16 query heads each, and an indexer that
chooses 16 blocks of 128 for each, also as one of two ranks has it.

Floors: of the indexer the bytes of keys and scales, or its products at twice the rate of bfloat16;
of attention the bytes of 2048 rows a token, or its products. Beside attention to the chosen stand
the kernels that attend to all: to the same latents in decodes, to expanded keys in prompts, which
are also attended behind a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.engine.timing.kernel_cases import BF16, Case, randn, scattered
from tandem_kernels import ops
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.attention.ragged_batch import RaggedBatch

_LATENT, _ROPE, _BLOCK, _TOP_K = 512, 64, 64, 2048
_HEADS, _INDEX_HEADS, _INDEX_DIM = 128, 64, 128
_CHOICE, _GROUP = BlockChoice(size=128, top_k=16, local=1), 16
_SCALE = 192**-0.5
_DECODES = tuple(itertools.product((1, 16, 64), (4096, 32_768, 131_072)))
_CHUNKS = (8192, 0), (8192, 24_576)
"""Tokens of a chunk, and those before it."""


def sparse_cases() -> Iterator[Case]:
    """Lists decodes, and chunks of a prompt of 32k tokens."""
    for count, context in _DECODES:
        yield from _cases(f"{count} x {context}", [context] * count, [1] * count)
    for length, cached in _CHUNKS:
        yield from _cases(f"{length} behind {cached}", [cached + length], [length])
    for count, context in itertools.product((1, 16, 64), (1024, 16_384, 131_072)):
        yield from _block_cases(f"{count} x {context}", [context] * count, [1] * count)
    for length, cached in _CHUNKS:
        yield from _block_cases(f"{length} behind {cached}", [cached + length], [length])


def _cases(shape: str, seq_lens: list[int], query_lens: list[int]) -> Iterator[Case]:
    metadata, num_blocks = scattered(seq_lens, query_lens, _BLOCK)
    num_tokens, contexts = sum(query_lens), sum(seq_lens)
    pages = IndexPages(
        torch.randint(0, 0x70, (num_blocks, _BLOCK, _INDEX_DIM), dtype=torch.uint8, device="cuda")
        .view(E4M3),
        torch.rand(num_blocks, _BLOCK, device="cuda"),
    )  # fmt: skip
    queries = randn(num_tokens, _INDEX_HEADS, _INDEX_DIM).to(E4M3)
    weights = torch.randn(num_tokens, _INDEX_HEADS, device="cuda")
    positions = _positions(seq_lens, query_lens)
    # Products of e4m3 numbers take half the time.
    flops = sum(positions) * _INDEX_HEADS * _INDEX_DIM
    choose = partial(ops.index_topk, queries, weights, pages, metadata, _TOP_K)
    moved = contexts * (_INDEX_DIM + 4) + queries.nbytes
    yield Case("sparse index", shape, [choose], moved, flops)

    chosen = choose()
    for heads in (_HEADS, _HEADS // 8):
        q_latent, q_rope = randn(num_tokens, heads, _LATENT), randn(num_tokens, heads, _ROPE)
        cache = torch.empty(num_blocks, _BLOCK, _LATENT + _ROPE, dtype=BF16, device="cuda")
        cache.normal_()
        taken = sum(min(position, _TOP_K) for position in positions)
        flops = 2 * taken * heads * (2 * _LATENT + _ROPE)
        rows = taken if max(query_lens) == 1 else contexts
        attend = partial(
            ops.sparse_latent_attention, q_latent, q_rope, cache, chosen, metadata, _SCALE
        )
        if max(query_lens) == 1:
            dense = partial(ops.latent_attention, q_latent, q_rope, cache, metadata, _SCALE)
            others: dict[str, list[Callable[[], object]]] = {"dense": [dense]}
        else:
            others = _of_expanded(query_lens[0], seq_lens[0], heads, chosen)
        yield Case(
            "sparse attention",
            f"{shape}, {heads} heads",
            [attend],
            rows * (_LATENT + _ROPE) * 2,
            flops,
            others=others,
        )


def _block_cases(shape: str, seq_lens: list[int], query_lens: list[int]) -> Iterator[Case]:
    metadata, num_blocks = scattered(seq_lens, query_lens, _BLOCK)
    num_tokens, contexts = sum(query_lens), sum(seq_lens)
    is_decode = max(query_lens) == 1
    positions = _positions(seq_lens, query_lens)
    taken = sum(min(position, _CHOICE.num_tokens) for position in positions)
    for kv_heads in (4, 2):
        pages = IndexPages(randn(num_blocks, _BLOCK, _INDEX_DIM))
        queries = randn(num_tokens, kv_heads, _INDEX_DIM)
        choose = partial(ops.choose_blocks, queries, pages, metadata, _CHOICE)
        name = f"{shape}, {kv_heads} KV heads"
        flops = 2 * sum(positions) * kv_heads * _INDEX_DIM
        yield Case("block index", name, [choose], contexts * _INDEX_DIM * 2, flops)
        q = randn(num_tokens, kv_heads * _GROUP, _INDEX_DIM)
        cache = randn(num_blocks, 2, kv_heads, _BLOCK, _INDEX_DIM)
        chosen, rest = choose(), (metadata, _CHOICE, _INDEX_DIM**-0.5)
        attend = partial(ops.block_sparse_attention, q, cache, chosen, *rest)
        dense = partial(ops.paged_attention, q, cache, metadata, _INDEX_DIM**-0.5)
        yield Case(
            "block attention",
            name,
            [attend],
            (taken if is_decode else contexts) * 2 * kv_heads * _INDEX_DIM * 2,
            4 * taken * kv_heads * _GROUP * _INDEX_DIM,
            others={"dense": [dense]},
        )


def _positions(seq_lens: list[int], query_lens: list[int]) -> list[int]:
    """Returns the number of keys that each query sees."""
    pairs = zip(seq_lens, query_lens, strict=True)
    return [one for n, q in pairs for one in range(n - q + 1, n + 1)]


def _of_expanded(
    num_queries: int, num_keys: int, heads: int, chosen: Tensor
) -> dict[str, list[Callable[[], object]]]:
    """Attends from the last tokens of a prompt to all of it, and to what they chose of it, behind a
    mask."""
    queries = randn(num_queries, heads, 3 * _ROPE)
    keys, values = randn(num_keys, heads, 3 * _ROPE), randn(num_keys, heads, 2 * _ROPE)
    bounds = (
        torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (num_queries, num_keys)
    )
    batch = RaggedBatch(*bounds, num_queries, num_keys, causal=True)
    first = torch.zeros(1, dtype=torch.int32, device="cuda")
    given = queries, keys, values, batch, _SCALE

    def masked() -> object:
        return ops.ragged_attention(*given, ops.chosen_bits(chosen, batch, first))

    return {"dense": [partial(ops.ragged_attention, *given)], "masked": [masked]}
