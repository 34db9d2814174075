"""Ragged edits of a table in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
MAX_PROGRAMS_PER_EDIT = 16


@triton.jit(do_not_specialize=["base_stride"])
def staged_writes_kernel(
    base: tl.tensor,
    row_ids: tl.tensor,
    starts: tl.tensor,
    cu_lens: tl.tensor,
    values: tl.tensor,
    base_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Writes, in program (e, j), chunks j, j + programs, ... of edit e. of edit e."""
    edit = tl.program_id(0)
    first = tl.load(cu_lens + edit)
    length = tl.load(cu_lens + edit + 1) - first
    row = tl.load(row_ids + edit).to(tl.int64)
    to = base + row * base_stride + tl.load(starts + edit)
    for offset in range(tl.program_id(1) * CHUNK, length, tl.num_programs(1) * CHUNK):
        place = offset + tl.arange(0, CHUNK)
        inside = place < length
        tl.store(to + place, tl.load(values + first + place, mask=inside), mask=inside)


def apply_staged_writes(
    base: Tensor, row_ids: Tensor, starts: Tensor, cu_lens: Tensor, values: Tensor
) -> None:
    """See `reference.batch.apply_staged_writes`.

    All but `base` may be pinned host memory; it must stay unchanged until the launch has run.
    """
    if values.shape[0] == 0:
        return
    programs = min(triton.cdiv(values.shape[0], CHUNK), MAX_PROGRAMS_PER_EDIT)
    grid = (row_ids.shape[0], programs)
    staged_writes_kernel[grid](
        base, row_ids, starts, cu_lens, values, base.stride(0), CHUNK=CHUNK, num_warps=4
    )
