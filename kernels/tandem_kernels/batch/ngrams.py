"""Drafts looked up in a row's own tokens, in two launches.

1. programs share a row's tokens: each finds, of the places where the last tokens came before,
   the best in its part, as one number: (length of the match, place)
2. a program a row takes the largest, and reads what followed
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.batch.batch_tables import RowTables

CHUNK = 512
MAX_DRAFTS = 16
MOST_PROGRAMS, FEWEST_PARTS, MOST_PARTS = 4096, 8, 64


@triton.jit(do_not_specialize=["width", "token_stride"])
def find_ngrams_kernel(
    idx_mapping: tl.tensor,
    token_ids: tl.tensor,
    total_len: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    token_stride: tl.tensor,
    MIN_LEN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Finds the best place of request `program_id(0)` in part `program_id(1)` of its row."""
    r, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(idx_mapping + r).to(tl.int64)
    best = tl.zeros([CHUNK], tl.int64)
    if row >= 0:
        length = tl.load(total_len + row)
        tokens = token_ids + row * token_stride
        for first in range(part * CHUNK, length, PARTS * CHUNK):
            end = first + tl.arange(0, CHUNK)
            goes_on = end < length
            matched = tl.zeros([CHUNK], tl.int64)
            for back in tl.static_range(1, MAX_LEN + 1):
                last = tl.load(tokens + tl.maximum(length - back, 0))
                goes_on = goes_on & (end >= back)
                token = tl.load(tokens + end - back, mask=goes_on, other=-1)
                goes_on = goes_on & (token == last)
                matched += goes_on.to(tl.int64)
            best = tl.maximum(best, tl.where(matched >= MIN_LEN, matched * width + end, 0))
    tl.store(found + r * PARTS + part, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["width", "token_stride"])
def read_drafts_kernel(
    idx_mapping: tl.tensor,
    token_ids: tl.tensor,
    total_len: tl.tensor,
    found: tl.tensor,
    drafts: tl.tensor,
    width: tl.tensor,
    token_stride: tl.tensor,
    PARTS: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
) -> None:
    """Reads what followed the best place of request `program_id(0)`."""
    r = tl.program_id(0)
    row = tl.maximum(tl.load(idx_mapping + r), 0).to(tl.int64)
    best = tl.max(tl.load(found + r * PARTS + tl.arange(0, PARTS)), axis=0)
    place = best % width
    period = tl.maximum(tl.load(total_len + row) - place, 1)
    k = tl.arange(0, MAX_DRAFTS)
    inside = k < NUM_DRAFTS
    token = tl.load(
        token_ids + row * token_stride + place + k % period, mask=inside & (best > 0), other=-1
    )
    tl.store(drafts + r * NUM_DRAFTS + k, token.to(tl.int64), mask=inside)


def lookup_ngrams(idx_mapping: Tensor, rows: RowTables, min_len: int, max_len: int) -> Tensor:
    """See `reference.ngrams.lookup_ngrams`. At most `MAX_DRAFTS` drafts."""
    num_reqs, num_drafts = idx_mapping.shape[0], rows.max_drafts
    assert num_drafts <= MAX_DRAFTS
    parts = _num_parts(num_reqs)
    found = torch.empty((num_reqs, parts), dtype=torch.int64, device=idx_mapping.device)
    drafts = torch.empty((num_reqs, num_drafts), dtype=torch.int64, device=idx_mapping.device)
    width, stride = rows.token_ids.shape[1], rows.token_ids.stride(0)
    find_ngrams_kernel[(num_reqs, parts)](
        idx_mapping,
        rows.token_ids,
        rows.total_len,
        found,
        width,
        stride,
        MIN_LEN=min_len,
        MAX_LEN=max_len,
        PARTS=parts,
        CHUNK=CHUNK,
        num_warps=4,
    )
    read_drafts_kernel[(num_reqs,)](
        idx_mapping,
        rows.token_ids,
        rows.total_len,
        found,
        drafts,
        width,
        stride,
        PARTS=parts,
        NUM_DRAFTS=num_drafts,
        MAX_DRAFTS=MAX_DRAFTS,
        num_warps=1,
    )
    return drafts


def _num_parts(num_reqs: int) -> int:
    """Returns a power of two: kernels are compiled for few numbers of parts."""
    parts: int = triton.next_power_of_2(max(1, MOST_PROGRAMS // max(1, num_reqs)))
    return max(FEWEST_PARTS, min(MOST_PARTS, parts))
