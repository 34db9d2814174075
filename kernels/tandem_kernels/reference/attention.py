"""Attention over a paged KV cache in plain torch.

Decodes of similar length share one batched call: their pages are gathered, the query heads that
share a KV head become query rows, and what they do not see is zeroed before it is used (a page's
unwritten tail may hold NaN, and a masked NaN still poisons a sum). Longer queries run one request
at a time on exactly the tokens of its context. In fixed order every query token is by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import KVPages, PagedKV, apart, sizes_of
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.reference.fp8_cache import dequantise
from tandem_kernels.reference.layouts import (
    ATTENDED_KV,
    ATTENTION,
    GATHERED_KV,
    KV_SCALES,
    kernel_takes,
)


@kernel_takes(
    q="T | H _",
    kv_cache=ATTENDED_KV,
    metadata=ATTENTION,
    sinks="H: float32",
    kv_scales=KV_SCALES,
)
def paged_attention(
    q: Tensor,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Computes the causal attention of the step's query tokens over their requests' contexts.

    Args:
        q: [T, Hq, D], Hq a multiple of Hkv; query head h reads KV head `h // (Hq // Hkv)`.
        kv_cache: [N, 2, Hkv, B, D], blocks contiguous, or pages whose values have Dv numbers; the
            step's own keys and values are already written.
        metadata: The ragged batch.
        scale: Multiplies the scores, usually `D ** -0.5`.
        softcap: Bounds them softly, to `softcap * tanh(score / softcap)`; 0: not.
        sinks: [Hq] float32 or None: a score of each query head, neither scaled nor bounded, that
            the softmax counts and that has no value (Xiao et al., Efficient Streaming Language
            Models with Attention Sinks, 2023).
        kv_scales: The cache has e4m3 numbers of these scales, and everything is computed in
            float32; None: it has the dtype of `q`.

    Returns:
        [T, Hq, Dv] in the dtype of `q`. Rows of requests with `seq_lens` 0 are zero.
    """
    dtype = q.dtype
    if kv_scales is not None:
        q = q.float()
    sizes = sizes_of(kv_cache)
    out = q.new_zeros(*q.shape[:2], sizes.value_dim)
    seq_lens = metadata.seq_lens.tolist()
    window = metadata.window
    alone = metadata.fixed_order or metadata.decode_query_len > 1
    num_decodes = 0 if alone else metadata.num_decodes
    decodes = tuple(seq_lens[:num_decodes])
    for requests, seen in _seen_by(decodes, window, sizes.block_size, q.device):
        blocks = seen.blocks(metadata.block_tables[requests])
        k, v = _gather(kv_cache, blocks, kv_scales, seen.hidden, seen.first_hidden)
        out[requests] = _decode(q[requests], k, v, seen, scale, softcap, sinks)
    if num_decodes < len(seq_lens):
        bounds = metadata.query_start_loc.tolist()
        for r in range(num_decodes, len(seq_lens)):
            start, end = bounds[r], bounds[r + 1]
            if start < end and seq_lens[r] > 0:
                first = 0 if window is None else max(0, seq_lens[r] - (end - start) - window + 1)
                blocks = metadata.block_tables[r]
                k, v = context(kv_cache, blocks, first, seq_lens[r], kv_scales)
                attend = _one_by_one if metadata.fixed_order else _prefill
                out[start:end] = attend(q[start:end], k, v, scale, softcap, window, sinks)
    return out.to(dtype)


def _similar_lengths(
    seq_lens: Sequence[int], window: int | None, block_size: int
) -> Iterator[list[int] | slice]:
    """Splits requests into groups of which the longest sees at most twice what the shortest does.
    Leaves out padding."""
    seen = [length if window is None else min(window, length) for length in seq_lens]
    if seen and min(seen) > 0 and max(seen) <= 2 * min(seen) + block_size:
        yield slice(0, len(seen))
        return
    group: list[int] = []
    order = sorted(range(len(seen)), key=seen.__getitem__)
    for r in order:
        if seen[r] == 0:
            continue
        if group and seen[r] > 2 * seen[group[0]] + block_size:
            yield group
            group = []
        group.append(r)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Seen:
    """Says what the query tokens of R decodes see, in the tokens of n blocks of each request.

    Attributes:
        num_blocks: n.
        before: [R, n], places of the blocks in the block tables; None: 0 and on.
        hidden: [R, n * B] bool, tokens that are not seen; None: all are.
        mask: [R, 1, 1, n * B], those that are seen.
        absent: [R, n] bool, blocks of which nothing is seen.
        first_hidden: All tokens before are seen by all.
    """

    num_blocks: int
    before: Tensor | None
    hidden: Tensor | None
    mask: Tensor | None
    absent: Tensor | None
    first_hidden: int

    def blocks(self, tables: Tensor) -> Tensor:
        """Returns the ids of the blocks, [R, n]. Entries behind a request's last one name its first
        one instead, which exists."""
        if self.before is None:
            blocks = tables[:, : self.num_blocks]
        else:
            blocks = tables.gather(1, self.before.clamp(max=tables.shape[1] - 1))
        if self.absent is None:
            return blocks
        return torch.where(self.absent, blocks[:, :1], blocks)


@lru_cache(maxsize=8)
def _seen_by(
    seq_lens: tuple[int, ...], window: int | None, block_size: int, device: torch.device
) -> list[tuple[slice | Tensor, _Seen]]:
    """Returns what groups of decodes of similar lengths see: the same in all layers of a step."""
    groups = list[tuple[slice | Tensor, _Seen]]()
    for requests in _similar_lengths(seq_lens, window, block_size):
        if isinstance(requests, slice):
            groups.append((requests, _seen(seq_lens[requests], window, block_size, device)))
            continue
        ends = [seq_lens[r] for r in requests]
        rows = torch.tensor(requests, device=device)
        groups.append((rows, _seen(ends, window, block_size, device)))
    return groups


def _seen(ends: Sequence[int], window: int | None, block_size: int, device: torch.device) -> _Seen:
    """Returns what decodes see whose contexts have these lengths."""
    begins, before = [0] * len(ends), [0] * len(ends)
    if window is not None:
        begins = [max(0, end - window) for end in ends]
        before = [begin // block_size for begin in begins]
    begins = [begin - first * block_size for begin, first in zip(begins, before, strict=True)]
    left = [end - first * block_size for end, first in zip(ends, before, strict=True)]
    num_blocks = -(-max(left) // block_size)
    places = None
    if any(before):
        places = _column(before, device) + torch.arange(num_blocks, device=device)
    if max(begins) == 0 and min(left) == num_blocks * block_size:
        return _Seen(num_blocks, places, None, None, None, 0)
    tokens = torch.arange(num_blocks * block_size, device=device)
    hidden = tokens >= _column(left, device)
    absent, first_hidden = hidden[:, ::block_size].clone(), min(left)
    if max(begins) > 0:
        hidden |= tokens < _column(begins, device)
        first_hidden = 0
    return _Seen(num_blocks, places, hidden, ~hidden[:, None, None], absent, first_hidden)


def _column(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)[:, None]


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: _Seen,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attends for one query token [R, Hq, D] of each request over its keys [R, Hkv, L, D]."""
    grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
    if softcap or sinks is not None:
        hides = None if seen.hidden is None else seen.hidden[:, None, None]
        sink = None if sinks is None else sinks.view(k.shape[1], -1)
        return _by_scores(grouped, k, v, scale, softcap, hides, sink).flatten(1, 2)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen.mask, scale=scale)
    return attended.flatten(1, 2)


def _gather(
    kv_cache: PagedKV,
    blocks: Tensor,
    kv_scales: KVScales | None,
    hidden: Tensor | None = None,
    first_hidden: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns the keys and the values of `blocks` [R, n], [R, Hkv, n * B, D] each; of an FP8 cache
    in float32. They are zero where `hidden` [R, n * B] is set, which is nowhere before
    `first_hidden`."""
    pages = kv_cache if kv_scales is None else kv_cache.view(torch.uint8)
    planes = (pages.k, pages.v) if isinstance(pages, KVPages) else (pages.flatten(1, 2),)
    found = [_gathered(plane, blocks) for plane in planes]
    if hidden is not None:
        for plane in found:
            plane[:, :, first_hidden:].masked_fill_(hidden[:, None, first_hidden:, None], 0)
    keys, values = found if len(found) == 2 else found[0].chunk(2, dim=1)
    if kv_scales is None:
        return keys, values
    return (
        dequantise(keys, kv_scales.k[:, None, None]),
        dequantise(values, kv_scales.v[:, None, None]),
    )


def _gathered(plane: Tensor, blocks: Tensor) -> Tensor:
    """Returns `blocks` [R, n] of a plane [N, H, B, D] as [R, H, n * B, D], copied once, a (block,
    head) at a time, where blocks lie a whole number of heads apart."""
    num_requests, num_blocks = blocks.shape
    count, num_heads, block_size, width = plane.shape
    heads_apart, rest = divmod(plane.stride(0), block_size * width)
    if rest:
        found = plane.index_select(0, blocks.flatten())
        by_request = found.view(num_requests, num_blocks, num_heads, block_size, width)
        return by_request.transpose(1, 2).flatten(2, 3)
    num_rows = (count - 1) * heads_apart + num_heads
    rows = plane.as_strided((num_rows, block_size, width), (block_size * width, width, 1))
    ids = tuple(blocks.flatten().tolist())
    chosen = _rows_of_heads(ids, num_requests, heads_apart, num_heads, blocks.device)
    gathered = rows.index_select(0, chosen)
    return gathered.view(num_requests, num_heads, -1, width)


@lru_cache(maxsize=8)
def _rows_of_heads(
    blocks: tuple[int, ...],
    num_requests: int,
    heads_apart: int,
    num_heads: int,
    device: torch.device,
) -> Tensor:
    """Returns the rows of (block, head) of `blocks`, as many of each request, head by head."""
    first = torch.tensor(blocks, dtype=torch.int64, device=device).view(num_requests, 1, -1)
    head = torch.arange(num_heads, device=device)[:, None]
    return (first * heads_apart + head).flatten()


def context(
    kv_cache: PagedKV,
    block_table: Tensor,
    first: int,
    seq_len: int,
    kv_scales: KVScales | None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of one request from position `first` on, [Hkv, seq_len - first, D] each."""
    block_size = sizes_of(kv_cache).block_size
    first_block = first // block_size
    blocks = block_table[None, first_block : -(-seq_len // block_size)]
    start = first_block * block_size
    k, v = (
        plane[0, :, first - start : seq_len - start]
        for plane in _gather(kv_cache, blocks, kv_scales)
    )
    return k, v


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends for `q` [T, Hq, D] over one context [Hkv, L, D]; query i sits at position L -
    T + i.
    """
    num_tokens, seq_len = q.shape[0], k.shape[1]
    mask, by_scores = None, softcap or sinks is not None
    if by_scores or num_tokens < seq_len or window is not None:
        mask = _last_tokens_see(num_tokens, seq_len, window, q.device)
    if by_scores and mask is not None:
        heads = q.view(num_tokens, len(k), -1, q.shape[2]).permute(1, 2, 0, 3)
        sink = None if sinks is None else sinks.view(len(k), -1, 1)
        by_head = _by_scores(heads, k[:, None], v[:, None], scale, softcap, ~mask, sink)
        return by_head.flatten(0, 1).transpose(0, 1)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


@lru_cache(maxsize=4)
def _last_tokens_see(
    num_tokens: int, seq_len: int, window: int | None, device: torch.device
) -> Tensor:
    """Returns which tokens of a context its last ones see, [T, L] bool."""
    seen = torch.ones(num_tokens, seq_len, dtype=torch.bool, device=device)
    seen = seen.tril_(seq_len - num_tokens)
    return seen if window is None else seen.triu_(seq_len - num_tokens - window + 1)


def _by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    hidden: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends with bounded scores or sinks, by what the softmax is: `q` [..., T, D] over `k` and
    `v` [..., L, D] but for what is hidden [..., T, L]; `sinks` [..., T]."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return (weights @ v.float()).to(q.dtype)


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes what `_prefill` does, each token on nothing but what it sees."""
    rows = []
    for row, end in zip(q, range(k.shape[1] - len(q) + 1, k.shape[1] + 1), strict=True):
        seen = slice(0 if window is None else max(0, end - window), end)
        k_seen, v_seen = k[:, seen].contiguous(), v[:, seen].contiguous()
        rows.append(_prefill(row[None], k_seen, v_seen, scale, softcap, None, sinks))
    return torch.cat(rows)


@kernel_takes(
    kv_cache=GATHERED_KV,
    first="R: int32",
    bounds="R+1: int32",
    block_tables=">=R | _: int32",
    kv_scales=KV_SCALES,
)
def gather_context(
    kv_cache: PagedKV,
    block_tables: Tensor,
    first: Tensor,
    bounds: Tensor,
    num_keys: int,
    dtype: torch.dtype,
    kv_scales: KVScales | None = None,
) -> tuple[Tensor, Tensor]:
    """Copies keys and values of parts of R requests' contexts.

    Args:
        kv_cache: [N, 2, Hkv, B, D], or pages.
        block_tables: [R, max_blocks] int32.
        first: [R] int32, the first position of each request that is copied.
        bounds: [R + 1] int32: those of request r become rows `bounds[r] : bounds[r + 1]`.
        num_keys: Of all of them, S.
        dtype: Of what is returned.
        kv_scales: Of an FP8 cache; None: the cache has numbers of `dtype`.

    Returns:
        Keys and values, [S, Hkv, D] and [S, Hkv, Dv], the numbers of a head behind each other.
    """
    counts = bounds.diff().long()
    requests = torch.repeat_interleave(counts)
    rows = torch.arange(num_keys, device=bounds.device)
    positions = rows - bounds[requests] + first[requests]
    block_size = sizes_of(kv_cache).block_size
    places = block_tables[requests, positions // block_size].long(), positions % block_size
    pages = apart(kv_cache) if kv_scales is None else apart(kv_cache).view(torch.uint8)
    keys, values = (plane.transpose(1, 2)[places] for plane in (pages.k, pages.v))
    if kv_scales is not None:
        keys = dequantise(keys, kv_scales.k[:, None])
        values = dequantise(values, kv_scales.v[:, None])
    return keys.to(dtype), values.to(dtype)
