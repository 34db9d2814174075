"""A step's inputs from rows in one launch, and rows brought up to date in another."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.batch.batch_tables import GroupTables, RowTables
from tandem_kernels.small_launches import in_turn, take_turn

CHUNK = 1024
REQUESTS_PER_PROGRAM = 128


@triton.jit
def _prepare_padding(
    chunk: tl.tensor,
    is_first: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_slot_mapping: tl.tensor,
    out_seq_lens: tl.tensor,
    max_tokens: tl.tensor,
    max_reqs: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    unused = (place >= num_tokens) & (place < max_tokens)
    tl.store(out_slot_mapping + place, tl.full([CHUNK], -1, tl.int64), mask=unused)
    tl.store(out_positions + place, tl.zeros([CHUNK], tl.int64), mask=unused & is_first)
    no_request = (place >= num_reqs) & (place < max_reqs) & is_first
    tl.store(out_seq_lens + place, tl.zeros([CHUNK], tl.int32), mask=no_request)


@triton.jit
def _copy_blocks(
    blocks: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Copies blocks [first, end) of a request."""
    lane = tl.arange(0, CHUNK)
    for offset in range(first, end, CHUNK):
        b = offset + lane
        tl.store(out + b, tl.load(blocks + b, mask=b < end), mask=b < end)


@triton.jit(
    do_not_specialize=[
        "num_reqs", "max_tokens", "max_reqs", "token_stride", "max_len", "max_drafts", "num_copies"
    ]
)  # fmt: skip
def prepare_inputs_kernel(
    idx_mapping: tl.tensor,
    query_start_loc: tl.tensor,
    token_ids: tl.tensor,
    num_computed: tl.tensor,
    row_max_len: tl.tensor,
    addresses: tl.tensor,
    sizes: tl.tensor,
    out_input_ids: tl.tensor,
    out_positions: tl.tensor,
    out_seq_lens: tl.tensor,
    num_reqs: tl.tensor,
    max_tokens: tl.tensor,
    max_reqs: tl.tensor,
    token_stride: tl.tensor,
    max_len: tl.tensor,
    max_drafts: tl.tensor,
    num_copies: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Prepares request r for group g in programs (i of r, g), r < num_reqs: its tokens in the first
    one, and part i of its blocks, of which there are `num_copies`. The other programs of a group
    fill the padding, a chunk each. What groups share the first one writes.
    """
    part = tl.program_id(0) % num_copies
    r = tl.program_id(0) // num_copies
    group = tl.program_id(1)
    is_first = group == 0
    block_table = tl.load(addresses + 3 * group).to(tl.pointer_type(tl.int32))
    out_slot_mapping = tl.load(addresses + 3 * group + 1).to(tl.pointer_type(tl.int64))
    out_block_tables = tl.load(addresses + 3 * group + 2).to(tl.pointer_type(tl.int32))
    block_size = tl.load(sizes + 2 * group)
    max_blocks = tl.load(sizes + 2 * group + 1)
    if r >= num_reqs:
        num_tokens = tl.load(query_start_loc + num_reqs)
        _prepare_padding(
            tl.program_id(0) - num_reqs * num_copies,
            is_first,
            num_reqs,
            num_tokens,
            out_positions,
            out_slot_mapping,
            out_seq_lens,
            max_tokens,
            max_reqs,
            CHUNK,
        )
        return
    row = tl.load(idx_mapping + r).to(tl.int64)
    writes_length = is_first & (part == 0)
    if row < 0:
        tl.store(out_seq_lens + r, 0, mask=writes_length)
        return
    start = tl.load(query_start_loc + r)
    query_len = tl.load(query_start_loc + r + 1) - start
    computed = tl.load(num_computed + row)
    limit = tl.load(row_max_len + row)
    runs = computed < limit
    limit += max_drafts
    seq_len = tl.minimum(computed + query_len, limit)
    tl.store(out_seq_lens + r, seq_len, mask=writes_length)
    blocks = block_table + row * max_blocks
    used_blocks = tl.cdiv(seq_len, block_size)
    of_part = tl.cdiv(max_blocks, num_copies)
    first = part * of_part
    to = out_block_tables + r.to(tl.int64) * max_blocks
    _copy_blocks(blocks, to, first, tl.minimum(first + of_part, used_blocks), CHUNK)
    if part > 0:
        return
    lane = tl.arange(0, CHUNK)
    for offset in range(0, query_len, CHUNK):
        i = offset + lane
        inside = i < query_len
        place = computed + i
        position = tl.minimum(place, max_len - 1)
        owned = inside & runs & (place < limit)
        block = tl.load(blocks + place // block_size, mask=owned, other=0).to(tl.int64)
        slot = tl.where(owned, block * block_size + place % block_size, -1)
        tl.store(out_slot_mapping + start + i, slot, mask=inside)
        of_all = inside & is_first
        token = tl.load(token_ids + row * token_stride + position, mask=of_all, other=0)
        tl.store(out_input_ids + start + i, token, mask=of_all)
        tl.store(out_positions + start + i, position.to(tl.int64), mask=of_all)


def prepare_inputs(idx_mapping: Tensor, query_start_loc: Tensor, groups: GroupTables) -> None:
    """See `reference.batch.prepare_inputs`.

    `token_ids` may be pinned host memory. Of a request's block table only the blocks of its
    context are written.
    """
    rows, out, num_reqs = groups.rows[0], groups.inputs[0], idx_mapping.shape[0]
    max_tokens, max_reqs = out.positions.shape[0], out.seq_lens.shape[0]
    padding_chunks = triton.cdiv(max(max_tokens, max_reqs), CHUNK)
    # One program copies a chunk of a long table in as much time as it waits for its place.
    num_copies = triton.cdiv(groups.most_blocks, CHUNK)
    prepare_inputs_kernel[(num_reqs * num_copies + padding_chunks, len(groups.rows))](
        idx_mapping,
        query_start_loc,
        rows.token_ids,
        rows.num_computed,
        rows.max_len,
        groups.addresses,
        groups.sizes,
        out.input_ids,
        out.positions,
        out.seq_lens,
        num_reqs,
        max_tokens,
        max_reqs,
        rows.token_ids.stride(0),
        rows.token_ids.shape[1],
        rows.max_drafts,
        num_copies,
        CHUNK=CHUNK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_decodes", "token_stride"])
def post_update_kernel(
    idx_mapping: tl.tensor,
    query_start_loc: tl.tensor,
    sampled: tl.tensor,
    token_ids: tl.tensor,
    num_computed: tl.tensor,
    total_len: tl.tensor,
    max_len: tl.tensor,
    num_taken: tl.tensor,
    num_reqs: tl.tensor,
    num_decodes: tl.tensor,
    token_stride: tl.tensor,
    REQUESTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STATES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Updates one request in each lane; rows of a step are all different."""
    take_turn(OVERLAP)
    r = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    row = tl.load(idx_mapping + r, mask=r < num_reqs, other=-1).to(tl.int64)
    live = row >= 0
    query_len = tl.load(query_start_loc + r + 1, mask=live, other=0)
    query_len -= tl.load(query_start_loc + r, mask=live, other=0)
    computed = tl.load(num_computed + row, mask=live, other=0) + query_len
    if HAS_STATES:
        taken = tl.where(r < num_decodes, computed - query_len, computed)
        tl.store(num_taken + row, taken, mask=live)

    length = tl.load(total_len + row, mask=live, other=0)
    limit = tl.load(max_len + row, mask=live, other=0)
    for place in tl.static_range(WIDTH):
        token = tl.load(sampled + r * WIDTH + place, mask=live, other=-1)
        appended = live & (token >= 0) & (length < limit)
        tl.store(token_ids + row * token_stride + length, token.to(tl.int32), mask=appended)
        length += appended.to(tl.int32)
    tl.store(total_len + row, length, mask=live)
    computed = tl.where(length < limit, tl.minimum(computed, length - 1), limit)
    tl.store(num_computed + row, computed, mask=live)


def post_update(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    rows: RowTables,
    num_decodes: int = 0,
) -> None:
    """See `reference.batch.post_update`."""
    num_reqs, width = sampled.shape
    has_states = rows.num_taken is not None
    post_update_kernel[(triton.cdiv(num_reqs, REQUESTS_PER_PROGRAM),)](
        idx_mapping,
        query_start_loc,
        sampled,
        rows.token_ids,
        rows.num_computed,
        rows.total_len,
        rows.max_len,
        rows.num_taken if has_states else rows.num_computed,
        num_reqs,
        num_decodes,
        rows.token_ids.stride(0),
        REQUESTS=REQUESTS_PER_PROGRAM,
        WIDTH=width,
        HAS_STATES=has_states,
        num_warps=4,
        **in_turn(sampled.device, num_reqs),
    )


@triton.jit(do_not_specialize=["num_reqs", "vocab_size", "token_stride", "max_len"])
def write_drafts_kernel(
    idx_mapping: tl.tensor,
    drafts: tl.tensor,
    token_ids: tl.tensor,
    total_len: tl.tensor,
    num_reqs: tl.tensor,
    vocab_size: tl.tensor,
    token_stride: tl.tensor,
    max_len: tl.tensor,
    REQUESTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Writes the drafts of one request in each lane."""
    r = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    row = tl.load(idx_mapping + r, mask=r < num_reqs, other=-1).to(tl.int64)
    live = row >= 0
    length = tl.load(total_len + row, mask=live, other=0)
    for place in tl.static_range(WIDTH):
        token = tl.load(drafts + r * WIDTH + place, mask=live, other=0)
        token = tl.where((token >= 0) & (token < vocab_size), token, 0)
        inside = live & (length + place < max_len)
        to = token_ids + row * token_stride + length + place
        tl.store(to, token.to(tl.int32), mask=inside)


def write_drafts(idx_mapping: Tensor, drafts: Tensor, vocab_size: int, rows: RowTables) -> None:
    """See `reference.batch.write_drafts`."""
    num_reqs, width = drafts.shape
    write_drafts_kernel[(triton.cdiv(num_reqs, REQUESTS_PER_PROGRAM),)](
        idx_mapping,
        drafts.contiguous(),
        rows.token_ids,
        rows.total_len,
        num_reqs,
        vocab_size,
        rows.token_ids.stride(0),
        rows.token_ids.shape[1],
        REQUESTS=REQUESTS_PER_PROGRAM,
        WIDTH=width,
        num_warps=4,
    )
