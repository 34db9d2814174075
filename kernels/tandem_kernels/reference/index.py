"""The indexer of sparse attention in plain torch: which tokens a query attends to.

A token's index key is one vector of D numbers, of which the first R are rotated. The score of a
token for a query is `sum over heads of w * relu(q . k)`; the highest `top_k` of those that a query
sees are chosen, and of equal ones the first. So a choice depends on nothing but the query and its
context: not on the batch, nor on how a prompt is cut.

In an FP8 cache queries and keys are turned by a Hadamard matrix, which changes no product, and
rounded to e4m3 with a power of two as the scale of each vector.

Source: DeepSeek-V3.2, 2025 (arXiv 2512.02556), 2.1; the rounding is that of its published code.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.reference.fp8 import E4M3_MAX, to_e4m3
from tandem_kernels.reference.layouts import ATTENTION, INDEX_PAGES, kernel_takes
from tandem_kernels.reference.slots import places_of

_SMALLEST = 1e-4
"""No vector is scaled as if its largest number were smaller."""


@kernel_takes(
    q="T | H D",
    k="T | D",
    k_norm="D",
    head_weights="T | H: float32",
    positions="T: int",
    cos_sin_cache="_ _: float32",
    pages=INDEX_PAGES,
    slot_mapping="T: int",
)
def index_rope_and_cache(
    q: Tensor,
    k: Tensor,
    k_norm: tuple[Tensor, Tensor],
    head_weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    pages: IndexPages,
    slot_mapping: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalises keys, rotates queries and keys, and writes keys into the cache.

    Args:
        q: [T, H, D].
        k: [T, D].
        k_norm: Weight and bias [D] of the keys' LayerNorm.
        head_weights: [T, H] float32.
        positions: [T] int64.
        cos_sin_cache: [M, R] float32, cosines in the first half, sines in the second.
        pages: Written at `slot_mapping`.
        slot_mapping: [T] int64, `block * B + offset`; -1 writes nothing.
        eps: Of the norm.

    Returns:
        Queries [T, H, D] as they are multiplied with keys, float32 or e4m3, and [T, H] float32
        weights that include the scales of e4m3 queries.
    """
    rope = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    weight, bias = (part.float() for part in k_norm)
    keys = F.layer_norm(k.float(), (k.shape[1],), weight, bias, eps)
    both = torch.cat((q.float(), keys[:, None]), dim=1)
    first, second = both[:, :, :rope].chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin, both[:, :, rope:]
    # As in the model's dtype: an FP8 cache rounds what the model would have multiplied.
    both = torch.cat(turned, dim=-1).to(q.dtype).float()
    scales = None
    if pages.scales is not None:
        both, scales = rounded(both)
        head_weights = head_weights * scales[:, :-1]
    queries, keys = both[:, :-1], both[:, -1]
    places = places_of(slot_mapping, pages.keys.shape[1])
    if scales is None or pages.scales is None:
        pages.keys.index_put_(places.at, places.of(keys))
    else:
        pages.keys.view(torch.uint8).index_put_(places.at, places.of(keys.view(torch.uint8)))
        pages.scales.index_put_(places.at, places.of(scales[:, -1]))
    return queries.contiguous(), head_weights


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Turns vectors [..., D] and rounds them: e4m3 numbers, and [...] float32 scales."""
    size = x.shape[-1]
    x = x @ hadamard(size).to(x.device) * size**-0.5
    scales = power_above(x.abs().amax(dim=-1).clamp(min=_SMALLEST) / E4M3_MAX)
    return to_e4m3(x / scales[..., None]), scales


@lru_cache
def hadamard(size: int) -> Tensor:
    """Returns the signs of the Hadamard matrix [size, size], float32; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def power_above(x: Tensor) -> Tensor:
    """Returns the smallest power of two that is not below each positive float32."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


@kernel_takes(q="T H D", head_weights="T H: float32", pages=INDEX_PAGES, metadata=ATTENTION)
def index_topk(
    q: Tensor,
    head_weights: Tensor,
    pages: IndexPages,
    metadata: AttentionMetadata,
    top_k: int,
    tokens: int = 1,
) -> Tensor:
    """Chooses the tokens that each query token attends to.

    Args:
        q, head_weights: As `index_rope_and_cache` returns them.
        pages: The step's own keys are already written.
        metadata: The ragged batch.
        top_k: The most tokens that are chosen for one.
        tokens: That a key stands for: what is chosen are rows of as many, and a token sees those
            that are closed; see `token_rows`.

    Returns:
        [T, top_k] int32, positions in the token's request, ascending; -1 behind the last. Rows of
        requests with `seq_lens` 0 are -1.
    """
    chosen = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    bounds = metadata.query_start_loc.tolist()
    for r, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = bounds[r], bounds[r + 1]
        if start == end or seq_len == 0:
            continue
        first = seq_len - (end - start)
        count = seq_len // tokens
        if count <= top_k:
            chosen[start:end, :count] = _all_seen(first, seq_len, tokens, q.device)
            continue
        keys = keys_of(pages, metadata.block_tables[r], count)
        for step in range(end - start) if metadata.fixed_order else (None,):
            own = slice(start, end) if step is None else slice(start + step, start + step + 1)
            seen = keys if step is None else keys[: (first + step + 1) // tokens]
            queries = q[own].float()
            scores = torch.bmm(queries.flatten(0, 1)[None], seen.t()[None]).relu_()
            scores = scores.view(*queries.shape[:2], len(seen))
            scores = torch.bmm(head_weights[own, None], scores)[:, 0]
            # A token by itself sees all that it is given.
            mask = None if len(scores) == 1 else _seen(first, seq_len, tokens, q.device)
            _choose(scores, mask, chosen[own])
    return chosen


def _seen(first: int, seq_len: int, tokens: int, device: torch.device) -> Tensor:
    """Returns which of S closed rows the tokens from `first` on see, [T, S]."""
    last = torch.arange(first, seq_len, device=device)[:, None]
    return torch.arange(seq_len // tokens, device=device) < (last + 1) // tokens


@lru_cache(maxsize=8)
def _all_seen(first: int, seq_len: int, tokens: int, device: torch.device) -> Tensor:
    """Returns the same rows, [T, S] int32; -1: one that is not seen."""
    number = torch.arange(seq_len // tokens, dtype=torch.int32, device=device)
    return torch.where(_seen(first, seq_len, tokens, device), number, -1)


def keys_of(pages: IndexPages, block_table: Tensor, seq_len: int) -> Tensor:
    """Returns the keys of a request, [seq_len, D] float32."""
    block_size = pages.keys.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    stored = pages.keys if pages.scales is None else pages.keys.view(torch.uint8)
    keys = stored[blocks].flatten(0, 1)[:seq_len]
    if pages.scales is None:
        return keys
    scales = pages.scales[blocks].flatten()[:seq_len]
    return keys.view(pages.keys.dtype).float() * scales[:, None]


def _choose(scores: Tensor, seen: Tensor | None, chosen: Tensor) -> None:
    """Writes the highest of `scores` [T, S] where `seen` into `chosen` [T, K]; None: all are."""
    top_k, length = chosen.shape[1], scores.shape[1]
    count = min(top_k, length)
    # Adding zero makes one zero of two, which compare equal and are sorted apart.
    scores = scores + 0.0
    if seen is not None:
        scores = torch.where(seen, scores, float("-inf"))
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    if seen is None:
        chosen[:, :count] = best.sort(dim=1).values.int()
        return
    behind = torch.where(seen.gather(1, best), best, length).sort(dim=1).values
    chosen[:, :count] = torch.where(behind < length, behind, -1).int()
