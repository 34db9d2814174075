"""Attention to chosen blocks of a context: the heads of a group read the same ones.

A program owns the query heads that share a KV head, of one token, and walks a part of their blocks,
wherever in the context these lie; nothing else of the context is read. With few tokens the blocks
are cut into SPLITS parts, joined by `latent_merge_kernel`; how many depends on shapes alone, so
steps can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.chosen_slots import request_of_token
from tandem_kernels.attention.fp8_cache import in_half
from tandem_kernels.attention.head_planes import planes_of_head
from tandem_kernels.attention.kv_pages import PagedKV, first_of, sizes_of
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.latent_merge import latent_merge_kernel
from tandem_kernels.attention.latent_tile import store_attended
from tandem_kernels.attention.prefill_attention import LOG2_E
from tandem_kernels.device import num_programs
from tandem_kernels.product_precision import precision_of
from tandem_kernels.tunings.table import TuningTable


@dataclass(frozen=True, slots=True)
class BlockSparseTuning:
    """Says how one shape runs.

    Attributes:
        tile: Tokens at once; it divides a block.
        programs_per_sm: Blocks are cut until there are this many programs.
        most_splits: Parts of them; a power of two.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 4
    most_splits: int = 16


def _within_block(taken: BlockSparseTuning, size: int, itemsize: int) -> BlockSparseTuning:
    return replace(taken, tile=min(size, taken.tile))


_TABLE = TuningTable("block_sparse", BlockSparseTuning, ("size", "itemsize"), _within_block)


def block_sparse_tuning(device: torch.device, size: int, itemsize: int) -> BlockSparseTuning:
    """Chooses by the tokens of a block and the bytes of a number."""
    return _TABLE.choose(device, size, itemsize)


@triton.jit
def _tile_of(
    blocks: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    seen: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the position of the tile at place `start` of what is chosen, and the page of its
    tokens, or where tiles are larger than pages those of each. Behind `end` they are any."""
    is_one: tl.constexpr = BLOCK_SIZE % TILE == 0
    begin = tl.load(blocks + start // SIZE, mask=start < end, other=0) * SIZE + start % SIZE
    if is_one:
        page = tl.load(table + tl.minimum(begin, seen - 1) // BLOCK_SIZE, mask=start < end, other=0)
    else:
        position = begin + tl.arange(0, TILE)
        known = (start < end) & (position < seen)
        page = tl.load(table + position // BLOCK_SIZE, mask=known, other=0)
    return begin, page


@triton.jit(do_not_specialize=["num_reqs"])
def block_sparse_kernel(
    q: tl.tensor,
    kv_cache: tl.tensor,
    chosen: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    num_reqs: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Walks, in program (t, h, s), part s of what the heads of group h of token t attend to. Writes
    [T, Hq, Dv], or with SPLITS > 1 float32 [T, Hq, SPLITS, Dv] and its softmax state.

    SIZE: Tokens of a block. BLOCK_SIZE: Of a page.
    """
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    r = request_of_token(query_start_loc, token, num_reqs, QUERY_LEN)
    own = token - tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - tl.load(query_start_loc + r)
    seq_len = tl.load(seq_lens + r)
    # A padding row has no context; one behind the last request has no place in it.
    seen = tl.where((seq_len > 0) & (own < num_tokens), seq_len - num_tokens + own + 1, 0)
    # Places of what is chosen, one behind the other: all blocks before the newest are full.
    needed = tl.minimum(tl.cdiv(seen, SIZE), TOP_K) * SIZE
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    value_dim = tl.arange(0, BLOCK_VALUE)
    lane = tl.arange(0, TILE)
    is_key = (dim < HEAD_DIM)[None, :]
    is_value = (value_dim < VALUE_DIM)[None, :]
    at = token.to(tl.int64)
    head = kv_head * GROUP + row
    real = row < GROUP
    place = q + at * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(place, mask=real[:, None] & is_key, other=0.0)
    if FP8:
        query = in_half(query)
        scale = scale * tl.load(k_scale + kv_head)
    keys_at, values_at = planes_of_head(
        kv_cache, kv_head, head_stride, value_stride, HEAD_DIM, VALUE_DIM
    )
    table = block_tables + r.to(tl.int64) * table_stride
    blocks = chosen + (at * NUM_KV_HEADS + kv_head) * TOP_K
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_VALUE], tl.float32)
    part = tl.cdiv(tl.cdiv(needed, TILE), SPLITS) * TILE
    first = split * part
    end = tl.minimum(first + part, needed)
    begin, page = _tile_of(blocks, table, first, end, seen, SIZE, BLOCK_SIZE, TILE)
    for start in range(first, end, TILE):
        position = begin + lane
        inside = position < seen
        line = page.to(tl.int64) * block_stride
        offset = position % BLOCK_SIZE
        of_keys = keys_at + line + offset * HEAD_DIM
        of_values = values_at + line + offset * VALUE_DIM
        # What is read next is found one tile ahead: its address waits for two loads.
        begin, page = _tile_of(blocks, table, start + TILE, end, seen, SIZE, BLOCK_SIZE, TILE)
        keys = tl.load(
            of_keys[:, None] + dim[None, :], mask=inside[:, None] & is_key, other=0.0
        ).to(query.dtype)
        values = tl.load(
            of_values[:, None] + value_dim[None, :], mask=inside[:, None] & is_value, other=0.0
        ).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(inside[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        share = weights.to(query.dtype)
        acc = tl.dot(share, values, acc * shrink[:, None], input_precision=PRECISION)
        peak = higher
    if FP8:
        acc = acc * tl.load(v_scale + kv_head)
    index = at * (NUM_KV_HEADS * GROUP) + head
    store_attended(out, state, index, split, real, peak, total, acc, VALUE_DIM, BLOCK_VALUE, SPLITS)


def block_sparse_attention(
    q: Tensor,
    kv_cache: PagedKV,
    chosen: Tensor,
    metadata: AttentionMetadata,
    choice: BlockChoice,
    scale: float,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """See `reference.block_sparse.block_sparse_attention`. The heads of one token must be adjacent.

    In fixed order nothing is cut into parts: what a token attends to is added up from the first.
    """
    num_tokens, num_heads, head_dim = q.shape
    kv_heads, block_size, _, value_dim = sizes_of(kv_cache)
    out = torch.empty((num_tokens, num_heads, value_dim), dtype=q.dtype, device=q.device)
    tuning = block_sparse_tuning(q.device, choice.size, q.element_size())
    splits = 1
    if not metadata.fixed_order:
        splits = _num_splits(q.device, tuning, num_tokens * kv_heads, choice)
    target, state = out, None
    if splits > 1:
        parts = num_tokens, num_heads, splits
        target, state = (q.new_empty(*parts, n, dtype=torch.float32) for n in (value_dim, 2))
    group = num_heads // kv_heads
    block_sparse_kernel[(num_tokens, kv_heads, splits)](
        q,
        first_of(kv_cache),
        chosen,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        *pointers(kv_scales),
        target,
        state,
        len(metadata.seq_lens),
        *metadata.strides(q, kv_cache),
        scale * LOG2_E,
        TOP_K=choice.top_k,
        SIZE=choice.size,
        QUERY_LEN=metadata.uniform_query_len,
        NUM_KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        VALUE_DIM=value_dim,
        BLOCK_VALUE=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_SIZE=block_size,
        TILE=tuning.tile,
        SPLITS=splits,
        PRECISION=precision_of(q),
        FP8=kv_scales is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if state is not None:
        shape = {"LATENT": value_dim, "BLOCK_LATENT": triton.next_power_of_2(value_dim)}
        grid = (num_tokens * num_heads,)
        latent_merge_kernel[grid](
            target, state, out, SPLITS=splits, OVERLAP=False, num_warps=4, **shape
        )
    return out


def _num_splits(
    device: torch.device, tuning: BlockSparseTuning, num_groups: int, choice: BlockChoice
) -> int:
    """Returns into how many parts the blocks of each of `num_groups` are cut."""
    free = num_programs(device, tuning.programs_per_sm) // max(1, num_groups)
    most = min(tuning.most_splits, triton.next_power_of_2(choice.num_tokens // tuning.tile))
    return min(int(most), 1 << max(free.bit_length() - 1, 0))
