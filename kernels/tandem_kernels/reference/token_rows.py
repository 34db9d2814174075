"""Attention to a window of tokens and to rows that stand for several, in plain torch.

A token has one vector for all heads, key and value at once, whose last R numbers are rotated; what
is attended to is rotated back by the token's own position, so that only distances count. Closed
rows are vectors alike; see `tandem_kernels.attention.token_rows`. Source: DeepSeek-V4, 2026, as
transformers 5.24 computes it (`DeepseekV4Attention`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.attention.token_rows import (
    BackTurn,
    NarrowRows,
    OpenTokens,
    RowPages,
    SeenRows,
    TokenRowForm,
)
from tandem_kernels.narrow_form import NARROW_GROUP
from tandem_kernels.reference.fp8 import BLOCK, quantise_fp8
from tandem_kernels.reference.index import rounded
from tandem_kernels.reference.layouts import (
    ATTENTION,
    BACK_TURN,
    INDEX_PAGES,
    OPEN_TOKENS,
    ROW_PAGES,
    SEEN_ROWS,
    Fields,
    kernel_takes,
)
from tandem_kernels.reference.slots import places_of

_WINDOW_ROWS: Fields = {
    "q": "T | H D",
    "pages": ROW_PAGES,
    "metadata": ATTENTION,
    "sinks": "H: float32",
    "rows": SEEN_ROWS,
    "back": BACK_TURN,
}


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Returns `x` [T, ..., D] float32 with its last R numbers rotated, pair i of them 2i and
    2i + 1; `table` [T, R] has cosines in the first half, sines in the second."""
    size = table.shape[1]
    cos, sin = table.view(len(x), *(1,) * (x.dim() - 2), size).chunk(2, dim=-1)
    even, odd = x[..., -size::2].float(), x[..., 1 - size :: 2].float()
    both = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((x[..., :-size].float(), both.flatten(-2)), dim=-1)


@kernel_takes(
    q="T | _ D",
    kv="T | D",
    weight="D",
    positions="T: int",
    cos_sin_cache="_ _: float32",
    pages=ROW_PAGES,
    slot_mapping="T: int",
)
def shared_rope_and_cache(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    pages: RowPages,
    slot_mapping: Tensor,
    eps: float,
) -> None:
    """Normalises and rotates queries in place, and writes normalised and rotated vectors into the
    cache.

    Args:
        q: [T, H, D], each head normalised without weights. There may be none: see `query_eps` of
            `window_rows_attention`.
        kv: [T, D].
        weight: [D] float32, of the norm of `kv`.
        positions: [T] int64.
        cos_sin_cache: [M, R] float32.
        pages: Of vectors, written at `slot_mapping`.
        slot_mapping: [T] int64, `block * B + offset`; -1 writes nothing.
        eps: Of both norms.
    """
    table = cos_sin_cache[positions]
    q.copy_(turned(_normed(q.float(), eps), table))
    rows = _normed(kv.float(), eps) * weight
    # As in the model's dtype: what is rotated has been rounded once.
    _write(turned(rows.to(kv.dtype), table), pages, slot_mapping)


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _write(rows: Tensor, pages: RowPages, slot_mapping: Tensor) -> None:
    places = places_of(slot_mapping, pages.shape[1])
    place, rows = places.at, places.of(rows)
    if not isinstance(pages, NarrowRows):
        pages.index_put_(place, rows.to(pages.dtype))
        return
    size = pages.numbers.shape[2]
    numbers, exponents = narrowed(rows[:, :size].float())
    pages.numbers.view(torch.uint8).index_put_(place, numbers.view(torch.uint8))
    pages.rotated.index_put_(place, rows[:, size:].to(pages.rotated.dtype))
    pages.exponents[..., : exponents.shape[1]].index_put_(place, exponents)


def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `x` [T, n] float32 as e4m3 numbers, and [T, S] uint8, the least powers of two, biased
    by 127, by which they stay in bounds. Numbers below 1e-4 count as that, as in DeepSeek's code.
    """
    size, count = x.shape[1], -(-x.shape[1] // NARROW_GROUP)
    groups = F.pad(x, (0, -size % NARROW_GROUP)).view(len(x), count, NARROW_GROUP)
    largest = groups.abs().amax(2).clamp(min=1e-4).contiguous()
    # The largest number of e4m3 is 1.75 * 2^8: above a mantissa of 1.75 it takes a power more.
    powers = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8
    scaled = (groups / _two_to(powers)[:, :, None]).clamp(-448.0, 448.0)
    return scaled.flatten(1)[:, :size].to(E4M3), powers.to(torch.uint8)


def widened(numbers: Tensor, exponents: Tensor) -> Tensor:
    """Returns what `narrowed` was given, as far as it was kept, [T, n] float32."""
    scales = _two_to(exponents.int()).repeat_interleave(NARROW_GROUP, dim=1)
    return numbers.float() * scales[:, : numbers.shape[1]]


def _two_to(powers: Tensor) -> Tensor:
    return (powers << 23).view(torch.float32)


@kernel_takes(x="T | W: float32", rows=OPEN_TOKENS)
def keep_open_tokens(x: Tensor, rows: OpenTokens) -> None:
    """Writes what tokens leave for their rows, `x` [T, W] float32, into the cache."""
    _write(x, rows.pages, rows.slot_mapping)


@kernel_takes(
    x="T | W: float32",
    rows=OPEN_TOKENS,
    bias="_ _: float32",
    weight="_",
    positions="T: int",
    cos_sin_cache="_ _: float32",
)
def close_rows(
    x: Tensor,
    rows: OpenTokens,
    form: TokenRowForm,
    bias: Tensor,
    weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
) -> Tensor:
    """Computes the rows that tokens of the step close, of its own tokens and of earlier ones, which
    are in the cache.

    Args:
        x: [T, W] float32, of the step's tokens.
        bias: [form.tokens, form.width] float32, added to the gates of a row's tokens.
        weight: [form.dim] float32, of the rows' norm.
        positions: [T] int64.
        cos_sin_cache: [M, R] float32. A row is rotated by the position of its first token.
        eps: Of the norm.

    Returns:
        [T, form.dim] float32; those of tokens that close no row are zero.
    """
    out = x.new_zeros(len(x), form.dim)
    bounds, lengths = rows.metadata.query_start_loc.tolist(), rows.metadata.seq_lens.tolist()
    for r, seq_len in enumerate(lengths):
        start, end = bounds[r], bounds[r + 1]
        first = seq_len - (end - start)
        closing = [
            token for token in range(start, end) if (first + token - start + 1) % form.tokens == 0
        ]
        if seq_len == 0 or not closing:
            continue
        back = form.series * form.tokens
        begin = max(first + closing[0] - start + 1 - back, 0)
        old = torch.arange(begin, first, device=x.device)
        blocks = rows.metadata.block_tables[r].long()[old // rows.pages.shape[1]]
        kept = torch.cat((rows.pages[blocks, old % rows.pages.shape[1]], x[start:end]))
        last = torch.tensor(closing, device=x.device) - start + first
        out[closing] = _closed(kept, last - begin, form, bias)
    out = _normed(out, eps) * weight
    firsts = (positions // form.tokens) * form.tokens
    return turned(out, cos_sin_cache[firsts])


def _closed(kept: Tensor, last: Tensor, form: TokenRowForm, bias: Tensor) -> Tensor:
    """Returns the rows whose last tokens are at `last` [n] of `kept` [S, W], [n, D]; what is before
    the first one counts for nothing."""
    size, width = form.tokens, form.width
    place = last[:, None] - torch.arange(form.series * size - 1, -1, -1, device=last.device)
    there = place.clamp(min=0)
    values = kept[:, form.first : form.first + width]
    gates = kept[:, form.first + width : form.first + 2 * width]
    # Tokens of the row before are read in the first series, its own in the last one.
    columns = torch.arange(form.series, device=last.device).repeat_interleave(size)
    of_token = columns[:, None] * form.dim + torch.arange(form.dim, device=last.device)
    taken = values[there[:, :, None], of_token]
    gate = gates[there[:, :, None], of_token] + bias.repeat(form.series, 1).gather(1, of_token)
    gate = gate.masked_fill((place < 0)[:, :, None], float("-inf"))
    return (taken * gate.softmax(1)).sum(1)


@kernel_takes(slot_mapping="T: int64")
def closed_slots(slot_mapping: Tensor, tokens: int) -> Tensor:
    """Returns the slots of the rows that tokens close: of `slot_mapping` [T] int64, which counts
    tokens, those behind which a row of `tokens` ends. -1: a token closes none."""
    closes = slot_mapping % tokens == tokens - 1  # So does -1, whose row is -1.
    return torch.where(closes, slot_mapping.div(tokens, rounding_mode="floor"), -1)


@kernel_takes(slot_mapping="T: int64", input_ids="T: int")
def placed_ids(slot_mapping: Tensor, input_ids: Tensor) -> Tensor:
    """Returns the ids of tokens, [T] int32 -> [T] int64, as far as `slot_mapping` [T] int64 has a
    slot for them; -1: it has none."""
    return torch.where(slot_mapping < 0, -1, input_ids.long())


@kernel_takes(x="T | D", pages=ROW_PAGES, slot_mapping="T: int")
def cache_rows(x: Tensor, pages: RowPages, slot_mapping: Tensor) -> None:
    """Writes rows [T, D] of any precision into the cache where a token closes one."""
    _write(x, pages, slot_mapping)


@kernel_takes(
    q="T | H D",
    keys="T | D",
    head_weights="T | H: float32",
    positions="T: int",
    cos_sin_cache="_ _: float32",
    pages=INDEX_PAGES,
    slot_mapping="T: int",
)
def index_rows(
    q: Tensor,
    keys: Tensor,
    head_weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    pages: IndexPages,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rotates an indexer's queries, and writes the keys of closed rows into the cache.

    Args:
        q: [T, H, D].
        keys: [T, D] float32, of the rows that tokens close, as `close_rows` returns them.
        head_weights: [T, H] float32.

    Other arguments, and what is returned, as in `index.index_rope_and_cache`; the last R numbers
    are rotated.
    """
    queries = turned(q, cos_sin_cache[positions]).to(q.dtype).float()
    keys = keys.to(q.dtype).float()
    if pages.scales is None:
        _write(keys, pages.keys, slot_mapping)
        return queries, head_weights
    queries, query_scales = rounded(queries)
    numbers, scales = rounded(keys)
    _write(numbers.view(torch.uint8), pages.keys.view(torch.uint8), slot_mapping)
    places = places_of(slot_mapping, pages.keys.shape[1])
    pages.scales.index_put_(places.at, places.of(scales))
    return queries, head_weights * query_scales


@kernel_takes(**_WINDOW_ROWS)
def window_rows_attention(
    q: Tensor,
    pages: RowPages,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor,
    rows: SeenRows | None,
    back: BackTurn,
    query_eps: float | None = None,
) -> Tensor:
    """Computes causal attention of the step's query tokens to a window of their contexts, and to
    closed rows, and rotates what it finds back.

    Args:
        q: [T, H, D], rotated.
        pages: In which the step's own vectors are already written.
        metadata: The ragged batch, with the window.
        scale: Multiplies the scores.
        sinks: [H] float32, scores without a value, which the softmax counts.
        query_eps: Of the norm of each head, where `q` is neither normalised nor rotated; by kernels
            only where `window_rows_shapes.attends_ahead`. None: it is.

    Returns:
        [T, H, D] in the dtype of `q`. Rows of requests with `seq_lens` 0 are zero.
    """
    if query_eps is not None:
        q = turned(_normed(q.float(), query_eps), back.cos_sin_cache[back.positions]).to(q.dtype)
    out = torch.zeros_like(q)
    bounds = metadata.query_start_loc.tolist()
    for r, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = bounds[r], bounds[r + 1]
        if seq_len == 0:
            continue
        # In fixed order each token is attended by itself: it is padded by no others' contexts.
        size = 1 if metadata.fixed_order else max(end - start, 1)
        for first in range(start, end, size):
            own = slice(first, first + size)
            context = seq_len - (end - own.stop)
            keys, mask = _attended_to(pages, metadata, r, own, context, rows)
            scores = torch.einsum("thd,sd->ths", q[own].float(), keys) * scale
            scores.masked_fill_(~mask[:, None], float("-inf"))
            sink = sinks.float()[None, :, None].expand(size, -1, 1)
            shares = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
            out[own] = torch.einsum("ths,sd->thd", shares, keys).to(out.dtype)
    cos, sin = back.cos_sin_cache[back.positions].chunk(2, dim=-1)
    return turned(out, torch.cat((cos, -sin), dim=-1)).to(q.dtype)


@kernel_takes(**_WINDOW_ROWS)
def window_rows_fp8(
    q: Tensor,
    pages: RowPages,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor,
    rows: SeenRows | None,
    back: BackTurn,
) -> tuple[Tensor, Tensor]:
    """Returns what `window_rows_attention` does, [T, H * D], as `fp8.quantise_fp8` returns groups
    of 128 numbers."""
    found = window_rows_attention(q, pages, metadata, scale, sinks, rows, back)
    return quantise_fp8(found.flatten(1), BLOCK)


def _attended_to(
    pages: RowPages,
    metadata: AttentionMetadata,
    request: int,
    own: slice,
    seq_len: int,
    rows: SeenRows | None,
) -> tuple[Tensor, Tensor]:
    """Returns what any of a request's tokens `own` attends to, whose last one ends a context of
    `seq_len`, [S, D] float32, and which of it each of them does, [T, S]."""
    device = metadata.block_tables.device
    last = torch.arange(seq_len - (own.stop - own.start), seq_len, device=device)[:, None]
    window = metadata.window or seq_len
    begin = max(int(last[0]) - window + 1, 0)
    keys = [_gathered(pages, metadata.block_tables[request], begin, seq_len)]
    position = torch.arange(begin, seq_len, device=device)
    masks = [(position <= last) & (position > last - window)]
    if rows is not None and seq_len >= rows.tokens:
        count = seq_len // rows.tokens
        keys.append(_gathered(rows.pages, rows.block_tables[request], 0, count))
        masks.append(_seen(rows, own, last, count))
    return torch.cat(keys).float(), torch.cat(masks, dim=1)


def _gathered(pages: RowPages, block_table: Tensor, first: int, end: int) -> Tensor:
    places = torch.arange(first, end, device=block_table.device)
    at = block_table.long()[places // pages.shape[1]], places % pages.shape[1]
    if not isinstance(pages, NarrowRows):
        return pages[at]
    rotated = pages.rotated[at]
    numbers = widened(pages.numbers.view(torch.uint8)[at].view(E4M3), pages.exponents[at])
    return torch.cat((numbers.to(rotated.dtype), rotated), dim=1)


def _seen(rows: SeenRows, own: slice, last: Tensor, count: int) -> Tensor:
    """Returns which of `count` rows the tokens at `last` [T, 1] see, [T, count]."""
    number = torch.arange(count, device=last.device)
    seen = number < (last + 1) // rows.tokens
    if rows.chosen is None:
        return seen
    chosen = rows.chosen[own].long()
    found = torch.zeros(len(chosen), count + 1, dtype=torch.bool, device=last.device)
    found.scatter_(1, torch.where((chosen < 0) | (chosen >= count), count, chosen), True)
    return seen & found[:, :count]
