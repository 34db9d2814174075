"""Attention to chosen blocks of a context, in plain torch.

A block is `size` tokens whose positions follow each other. The heads of a group, which share a KV
head, choose together: by a query of their own, the score of a block is the highest product with the
index keys of its tokens. The `top_k` best of the blocks that a query sees are chosen, its own one
and those just before it in any case, and of equal ones the first. So a choice depends on nothing
but the query and its context.

Source: MiniMax-M3, 2026, as transformers 5.24 computes it (`MiniMaxM3VLIndexer`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.kv_pages import PagedKV, sizes_of
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.reference.attention import context
from tandem_kernels.reference.index import keys_of
from tandem_kernels.reference.layouts import (
    ATTENDED_KV,
    ATTENTION,
    INDEX_PAGES,
    KV_SCALES,
    kernel_takes,
)


@kernel_takes(q="T | _ D", pages=INDEX_PAGES, metadata=ATTENTION)
def choose_blocks(
    q: Tensor, pages: IndexPages, metadata: AttentionMetadata, choice: BlockChoice
) -> Tensor:
    """Chooses the blocks that each query token attends to, for each group of heads.

    Args:
        q: [T, G, D], rotated.
        pages: The step's own keys are already written; they are of the type of `q`.
        metadata: The ragged batch.
        choice: How many blocks, and of which size.

    Returns:
        [T, G, top_k] int32, numbers of blocks of the token's request, ascending; -1 behind the
        last. Rows of requests with `seq_lens` 0 are -1.
    """
    shape = *q.shape[:2], choice.top_k
    chosen = torch.full(shape, -1, dtype=torch.int32, device=q.device)
    for r, start, end, seq_len in _requests(metadata):
        keys = keys_of(pages, metadata.block_tables[r], seq_len).float()
        first = seq_len - (end - start)
        # One by one where a token's sums must not depend on how many there are.
        for own in _parts(start, end, metadata):
            last = torch.arange(first + own.start - start, first + own.stop - start)
            seen = keys[: int(last[-1]) + 1]
            scores = torch.einsum("tgd,sd->tgs", q[own].float(), seen)
            _choose(scores, last.to(q.device), choice, chosen[own])
    return chosen


def _requests(metadata: AttentionMetadata) -> list[tuple[int, int, int, int]]:
    """Returns the number of each request that has tokens, its query rows, and its context."""
    bounds, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    rows = zip(range(len(lengths)), bounds, bounds[1:], lengths, strict=False)
    return [row for row in rows if row[1] < row[2] and row[3] > 0]


def _parts(start: int, end: int, metadata: AttentionMetadata) -> list[slice]:
    if metadata.fixed_order:
        return [slice(token, token + 1) for token in range(start, end)]
    return [slice(start, end)]


def _choose(scores: Tensor, last: Tensor, choice: BlockChoice, chosen: Tensor) -> None:
    """Writes the best blocks of `scores` [T, G, S] of tokens at the positions `last` [T]."""
    size, length = choice.size, scores.shape[-1]
    num_blocks = -(-length // size)
    positions = torch.arange(length, device=scores.device)
    scores = scores.masked_fill(positions > last[:, None, None], float("-inf"))
    padding = num_blocks * size - length
    scores = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
    best = scores.view(*scores.shape[:2], num_blocks, size).amax(-1)
    blocks, own = torch.arange(num_blocks, device=scores.device), last // size
    is_near = (blocks <= own[:, None]) & (blocks > own[:, None] - choice.local)
    best = best.masked_fill(is_near[:, None], float("inf"))
    count = min(choice.top_k, num_blocks)
    order = best.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    is_seen = best.gather(-1, order) > float("-inf")
    found = torch.where(is_seen, order, num_blocks).sort(dim=-1).values
    chosen[..., :count] = torch.where(found < num_blocks, found, -1).int()


@kernel_takes(
    q="T | _ _",
    kv_cache=ATTENDED_KV,
    chosen="T _ _: int32",
    metadata=ATTENTION,
    kv_scales=KV_SCALES,
)
def block_sparse_attention(
    q: Tensor,
    kv_cache: PagedKV,
    chosen: Tensor,
    metadata: AttentionMetadata,
    choice: BlockChoice,
    scale: float,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Computes causal attention of the step's query tokens to chosen blocks of their contexts.

    Args:
        chosen: [T, Hkv, top_k], as `choose_blocks` returns them.

    Other arguments and the result are those of `attention.paged_attention`.
    """
    sizes = sizes_of(kv_cache)
    out = q.new_zeros(*q.shape[:2], sizes.value_dim)
    grouped = q.reshape(len(q), sizes.num_kv_heads, -1, q.shape[2]).float()
    for r, start, end, seq_len in _requests(metadata):
        k, v = context(kv_cache, metadata.block_tables[r], 0, seq_len, kv_scales)
        positions = torch.arange(seq_len, device=q.device)
        first = seq_len - (end - start)
        for own in _parts(start, end, metadata):
            last = torch.arange(first + own.start - start, first + own.stop - start)
            seen = int(last[-1]) + 1
            blocks = positions[:seen] // choice.size
            mask = (chosen[own, :, :, None] == blocks).any(2)
            mask &= positions[:seen] <= last[:, None, None].to(q.device)
            if metadata.fixed_order:
                # What is not attended to must not be added: zeros shift how sums are cut.
                heads = [_attend_few(grouped[own, h], k[h], v[h], mask[0, h], scale)
                         for h in range(sizes.num_kv_heads)]  # fmt: skip
                attended = torch.stack(heads, 1)
            else:
                scores = torch.einsum("tgrd,gsd->tgrs", grouped[own], k[:, :seen].float()) * scale
                scores.masked_fill_(~mask[:, :, None], float("-inf"))
                attended = torch.einsum("tgrs,gsd->tgrd", scores.softmax(-1), v[:, :seen].float())
            out[own] = attended.flatten(1, 2).to(out.dtype)
    return out


def _attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attends for one token's group [1, R, D] to the tokens of `mask` [S]."""
    places = mask.nonzero()[:, 0]
    scores = torch.einsum("trd,sd->trs", q, k[places].float()) * scale
    return torch.einsum("trs,sd->trd", scores.softmax(-1), v[places].float())
