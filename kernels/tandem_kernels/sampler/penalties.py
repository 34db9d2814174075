"""Changes of logits before sampling: penalties, their counts, sparse additions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
ENTRIES_PER_PROGRAM = 256


@triton.jit(do_not_specialize=["num_entries"])
def add_sparse_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    values: tl.tensor,
    logits_stride: tl.tensor,
    num_entries: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < num_entries
    row = tl.load(rows + entry, mask=inside, other=0).to(tl.int64)
    col = tl.load(cols + entry, mask=inside, other=0)
    value = tl.load(values + entry, mask=inside, other=0.0)
    tl.atomic_add(logits + row * logits_stride + col, value, mask=inside, sem="relaxed")


def add_sparse(logits: Tensor, rows: Tensor, cols: Tensor, values: Tensor) -> None:
    """See `reference.sampling.add_sparse`; float32 logits. The rest may be pinned host memory."""
    num_entries = rows.shape[0]
    if num_entries == 0:
        return
    add_sparse_kernel[(triton.cdiv(num_entries, ENTRIES_PER_PROGRAM),)](
        logits,
        rows,
        cols,
        values,
        logits.stride(0),
        num_entries,
        ENTRIES=ENTRIES_PER_PROGRAM,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_reqs"])
def count_tokens_kernel(
    output_counts: tl.tensor,
    penalty_rows: tl.tensor,
    token_ids: tl.tensor,
    counts_stride: tl.tensor,
    num_reqs: tl.tensor,
    REQUESTS: tl.constexpr,
) -> None:
    r = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    row = tl.load(penalty_rows + r, mask=r < num_reqs, other=-1).to(tl.int64)
    token = tl.load(token_ids + r, mask=r < num_reqs, other=-1)
    counted = (row >= 0) & (token >= 0)
    tl.atomic_add(output_counts + row * counts_stride + token, 1, mask=counted, sem="relaxed")


def count_tokens(output_counts: Tensor, penalty_rows: Tensor, token_ids: Tensor) -> None:
    """See `reference.sampling.count_tokens`."""
    num_reqs = token_ids.shape[0]
    if num_reqs == 0:
        return
    count_tokens_kernel[(triton.cdiv(num_reqs, ENTRIES_PER_PROGRAM),)](
        output_counts,
        penalty_rows,
        token_ids,
        output_counts.stride(0),
        num_reqs,
        REQUESTS=ENTRIES_PER_PROGRAM,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["presence", "frequency"])
def apply_penalties_kernel(
    logits: tl.tensor,
    prompt_mask: tl.tensor,
    output_counts: tl.tensor,
    penalty_rows: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    drafts: tl.tensor,
    logits_stride: tl.tensor,
    mask_stride: tl.tensor,
    counts_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
) -> None:
    """Changes, in program (s, j), tokens j * BLOCK and on of row s."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(penalty_rows + s).to(tl.int64)
    if row < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    place = logits + s * logits_stride + token
    x = tl.load(place, mask=inside, other=0.0)
    count = tl.load(output_counts + row * counts_stride + token, mask=inside, other=0)
    for k in tl.static_range(NUM_DRAFTS):
        count += (token == tl.load(drafts + s * NUM_DRAFTS + k)).to(tl.int32)
    words = tl.load(prompt_mask + row * mask_stride + token // 32, mask=inside, other=0)
    in_prompt = ((words >> (token % 32)) & 1) != 0
    factor = tl.where(in_prompt | (count > 0), tl.load(repetition + s), 1.0)
    x = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
    x -= tl.load(frequency + s) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence + s), 0.0)
    tl.store(place, x, mask=inside)


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    penalty_rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    drafts: Tensor,
) -> None:
    """See `reference.sampling.apply_penalties`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    apply_penalties_kernel[(num_rows, triton.cdiv(vocab_size, block))](
        logits,
        prompt_mask,
        output_counts,
        penalty_rows,
        repetition,
        presence,
        frequency,
        drafts,
        logits.stride(0),
        prompt_mask.stride(0),
        output_counts.stride(0),
        vocab_size,
        BLOCK=block,
        NUM_DRAFTS=drafts.shape[1],
        num_warps=8,
    )
