"""Attention to a window of tokens and to closed rows, whose vectors are keys and values at once.

    tiles of one token   | window, by its block table | rows, by theirs: chosen ones, or all seen |

A program owns ROWS heads of one token and walks a part of these tiles; a vector is loaded once and
serves as key and as value. Sinks are in the first part. With few tokens there are SPLITS parts,
joined by `attended_rows`; how many depends on shapes alone, so steps can be recorded. Where tokens
are many, `window_rows_ahead_kernel` attends on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attended_rows import finished_rows, quantised_rows
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.chosen_slots import request_of_token
from tandem_kernels.attention.latent_tile import store_attended
from tandem_kernels.attention.narrow_vectors import load_narrow, page_pointers, page_widths
from tandem_kernels.attention.prefill_attention import LOG2_E
from tandem_kernels.attention.sparse_latent_attention import SparseTuning
from tandem_kernels.attention.token_rows import BackTurn, RowPages, SeenRows
from tandem_kernels.attention.window_rows_ahead import window_rows_ahead_kernel
from tandem_kernels.attention.window_rows_shapes import attends_ahead
from tandem_kernels.device import num_programs
from tandem_kernels.product_precision import precision_of
from tandem_kernels.tunings.table import plain_table

AHEAD = SparseTuning(rows=64, tile=64, num_warps=8, num_stages=2, programs_per_sm=1)
"""`window_rows_ahead_kernel` is made for it. 8192 tokens of 64 heads take 0.50 ms in place of 0.93
with a window alone, 2.13 in place of 3.32 with 512 chosen rows of 4 tokens, 0.65 in place of 1.29
with rows of 128 (one H200)."""


@triton.jit
def _attend(
    query: tl.tensor,
    vectors: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Takes vectors [TILE, D] into a softmax state; `seen` [TILE] says which."""
    scores = tl.dot(query, tl.trans(vectors), input_precision=PRECISION)
    scores = tl.where(seen[None, :], scores * scale, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    share = weights.to(vectors.dtype)
    return higher, total, tl.dot(share, vectors, acc * shrink[:, None], input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_reqs"])
def window_rows_kernel(
    q: tl.tensor,
    pages: tl.tensor,
    rotated: tl.tensor,
    exponents: tl.tensor,
    block_tables: tl.tensor,
    row_pages: tl.tensor,
    row_rotated: tl.tensor,
    row_exponents: tl.tensor,
    row_tables: tl.tensor,
    chosen: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    num_reqs: tl.tensor,
    token_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    row_block_stride: tl.tensor,
    row_table_stride: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW_ROPE: tl.constexpr,
    NARROW_SPAN: tl.constexpr,
    EXPONENTS: tl.constexpr,
) -> None:
    """Walks, in program (t, i, s), part s of what token t attends to, for its i-th tile of heads.
    Writes [T, H, L], or with SPLITS > 1 float32 [T, H, SPLITS, L] and its softmax state.

    WINDOW: 0: a token sees all before it.
    TOKENS: That a row stands for; 0: there are no rows.
    TOP_K: Rows that are chosen; 0: all that a token sees.
    NARROW_ROPE: Numbers of a narrow vector that are not in e4m3; 0: vectors are not narrow.
    """
    token = tl.program_id(0)
    split = tl.program_id(2)
    r = request_of_token(query_start_loc, token, num_reqs, QUERY_LEN)
    start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - start
    seq_len = tl.load(seq_lens + r)
    is_real = (seq_len > 0) & (token - start < num_tokens)
    context = tl.where(is_real, seq_len - num_tokens + token - start + 1, 0)
    begin = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else context * 0
    num_rows = context * 0
    if TOKENS > 0:
        num_rows = context // TOKENS
        if TOP_K > 0:
            num_rows = tl.minimum(num_rows, TOP_K)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = head < NUM_HEADS
    at = token.to(tl.int64)
    dim = tl.arange(0, BLOCK_LATENT)
    is_dim = (dim < LATENT)[None, :]
    own = q + at * token_stride + head[:, None] * LATENT + dim[None, :]
    query = tl.load(own, mask=real[:, None] & is_dim, other=0.0)
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if split == 0:
        peak = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([ROWS, BLOCK_LATENT], tl.float32)
    of_window = tl.cdiv(context - begin, TILE)
    tiles = of_window + tl.cdiv(num_rows, TILE)
    part = tl.cdiv(tiles, SPLITS)
    first = split * part
    end = tl.minimum(first + part, tiles)
    lane = tl.arange(0, TILE)
    table = block_tables + r.to(tl.int64) * table_stride
    for tile in range(first, tl.minimum(end, of_window)):
        position = begin + tile * TILE + lane
        inside = position < context
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        if NARROW_ROPE > 0:
            vectors = load_narrow(
                pages, rotated, exponents, block, position % BLOCK_SIZE, inside, block_stride,
                TILE, LATENT, NARROW_ROPE, NARROW_SPAN, EXPONENTS,
            )  # fmt: skip
        else:
            line = pages + block * block_stride + position % BLOCK_SIZE * LATENT
            mask = inside[:, None] & is_dim
            vectors = tl.load(line[:, None] + dim[None, :], mask=mask, other=0.0)
        peak, total, acc = _attend(query, vectors, inside, scale, peak, total, acc, PRECISION)
    if TOKENS > 0:
        table = row_tables + r.to(tl.int64) * row_table_stride
        for tile in range(tl.maximum(first, of_window), end):
            number = (tile - of_window) * TILE + lane
            inside = number < num_rows
            if TOP_K > 0:
                number = tl.load(chosen + at * TOP_K + number, mask=inside, other=0)
            block = tl.load(table + number // ROW_BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            if NARROW_ROPE > 0:
                vectors = load_narrow(
                    row_pages, row_rotated, row_exponents, block, number % ROW_BLOCK_SIZE, inside,
                    row_block_stride, TILE, LATENT, NARROW_ROPE, NARROW_SPAN, EXPONENTS,
                )  # fmt: skip
            else:
                line = row_pages + block * row_block_stride + number % ROW_BLOCK_SIZE * LATENT
                mask = inside[:, None] & is_dim
                vectors = tl.load(line[:, None] + dim[None, :], mask=mask, other=0.0)
            peak, total, acc = _attend(query, vectors, inside, scale, peak, total, acc, PRECISION)
    index = at * NUM_HEADS + head
    store_attended(out, state, index, split, real, peak, total, acc, LATENT, BLOCK_LATENT, SPLITS)


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
    """See `reference.token_rows.window_rows_attention`."""
    if attends_ahead(q, pages, metadata):
        found = _attended_ahead(q, pages, metadata, scale, sinks, rows, back, query_eps)
        return finished_rows(found, None, back, q.dtype)
    assert query_eps is None, "queries are as keys are multiplied with them"
    return finished_rows(*_attended(q, pages, metadata, scale, sinks, rows), back, q.dtype)


def window_rows_fp8(
    q: Tensor,
    pages: RowPages,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor,
    rows: SeenRows | None,
    back: BackTurn,
) -> tuple[Tensor, Tensor]:
    """See `reference.token_rows.window_rows_fp8`."""
    return quantised_rows(*_attended(q, pages, metadata, scale, sinks, rows), back)


def _attended(
    q: Tensor,
    pages: RowPages,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor,
    rows: SeenRows | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns attended rows [T, H, D], or parts of them [T, H, S, D] and their softmax states."""
    num_tokens, num_heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out, None
    tuning = window_rows_tuning(q, metadata.fixed_order)
    head_tiles = triton.cdiv(num_heads, tuning.rows)
    splits = _num_splits(q.device, tuning, num_tokens * head_tiles, metadata, rows)
    target, state = _results(q, splits, out)
    shape = {"LATENT": dim, "BLOCK_LATENT": triton.next_power_of_2(dim), "SPLITS": splits}
    of_rows = (pages, metadata.block_tables) if rows is None else (rows.pages, rows.block_tables)
    own, others, widths = page_pointers(pages), page_pointers(of_rows[0]), page_widths(pages)
    span = triton.next_power_of_2(widths["NARROW_ROPE"])
    chosen = None if rows is None else rows.chosen
    window_rows_kernel[(num_tokens, head_tiles, splits)](
        q,
        *own,
        metadata.block_tables,
        *others,
        of_rows[1],
        chosen,
        metadata.query_start_loc,
        metadata.seq_lens,
        sinks,
        target,
        state,
        len(metadata.seq_lens),
        q.stride(0),
        own[0].stride(0),
        metadata.block_tables.stride(0),
        others[0].stride(0),
        of_rows[1].stride(0),
        scale * LOG2_E,
        WINDOW=metadata.window or 0,
        TOKENS=0 if rows is None else rows.tokens,
        TOP_K=0 if chosen is None else chosen.shape[1],
        QUERY_LEN=metadata.uniform_query_len,
        NUM_HEADS=num_heads,
        ROWS=tuning.rows,
        BLOCK_SIZE=pages.shape[1],
        ROW_BLOCK_SIZE=of_rows[0].shape[1],
        TILE=tuning.tile,
        PRECISION=precision_of(q),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        NARROW_SPAN=span,
        **widths,
        **shape,
    )
    return target, state


def _attended_ahead(
    q: Tensor,
    pages: RowPages,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor,
    rows: SeenRows | None,
    back: BackTurn,
    query_eps: float | None,
) -> Tensor:
    """Does the same where `attends_ahead`."""
    assert isinstance(pages, Tensor)
    num_tokens, num_heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    row_pages, row_tables, chosen = pages, metadata.block_tables, None
    if rows is not None:
        assert isinstance(rows.pages, Tensor)
        row_pages, row_tables, chosen = rows.pages, rows.block_tables, rows.chosen
    head_tiles = triton.cdiv(num_heads, AHEAD.rows)
    programs = min(num_tokens * head_tiles, num_programs(q.device, AHEAD.programs_per_sm))
    window_rows_ahead_kernel[(programs,)](
        q,
        pages,
        metadata.block_tables,
        row_pages,
        row_tables,
        chosen,
        metadata.query_start_loc,
        metadata.seq_lens,
        sinks,
        back.positions,
        back.cos_sin_cache,
        out,
        len(metadata.seq_lens),
        num_tokens,
        q.stride(0),
        pages.stride(0),
        metadata.block_tables.stride(0),
        row_pages.stride(0),
        row_tables.stride(0),
        scale * LOG2_E,
        0.0 if query_eps is None else query_eps,
        WINDOW=metadata.window or 0,
        TOKENS=0 if rows is None else rows.tokens,
        TOP_K=0 if chosen is None else chosen.shape[1],
        QUERY_LEN=metadata.uniform_query_len,
        NUM_HEADS=num_heads,
        ROWS=AHEAD.rows,
        LATENT=dim,
        BLOCK_SIZE=pages.shape[1],
        ROW_BLOCK_SIZE=row_pages.shape[1],
        TILE=AHEAD.tile,
        TILES=head_tiles,
        ROPE=0 if query_eps is None else back.cos_sin_cache.shape[1],
        num_warps=AHEAD.num_warps,
    )
    return out


def _results(q: Tensor, splits: int, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns where attended vectors go, and their softmax states if they come in parts."""
    if splits == 1:
        return out, None
    num_tokens, num_heads, dim = q.shape
    parts = num_tokens, num_heads, splits
    vectors, states = (q.new_empty(*parts, n, dtype=torch.float32) for n in (dim, 2))
    return vectors, states


_TABLE = plain_table(
    "window_rows", SparseTuning, ("num_tokens", "num_heads", "itemsize", "fixed_order")
)


def window_rows_tuning(q: Tensor, fixed_order: bool) -> SparseTuning:
    """Chooses by queries [T, H, D]: heads, dtype and, but for `fixed_order`, their number."""
    num_tokens, num_heads, _ = q.shape
    return _TABLE.choose(q.device, num_tokens, num_heads, q.element_size(), fixed_order)


def _num_splits(
    device: torch.device,
    tuning: SparseTuning,
    num_tiles: int,
    metadata: AttentionMetadata,
    rows: SeenRows | None,
) -> int:
    """Returns into how many parts a token's tiles are cut when there are this many tiles of heads:
    by shapes alone; in fixed order into none."""
    if metadata.fixed_order:
        return 1
    most = metadata.window or metadata.max_seq_len
    if rows is not None:
        room = rows.block_tables.shape[1] * rows.pages.shape[1]
        most += room if rows.chosen is None else rows.chosen.shape[1]
    free = num_programs(device, tuning.programs_per_sm) // num_tiles
    most = min(tuning.most_splits, triton.next_power_of_2(triton.cdiv(most, tuning.tile)))
    return min(int(most), 1 << max(free.bit_length() - 1, 0))
