"""Ragged edits of many tables in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
MAX_PROGRAMS_PER_PIECE = 16
_DESCRIPTION = tl.constexpr(4)
"""Numbers that describe a piece."""


@triton.jit
def write_pieces_kernel(addresses: tl.tensor, packed: tl.tensor, CHUNK: tl.constexpr) -> None:
    """Writes, in program (p, j), chunks j, j + programs, ... of piece p."""
    described = packed.to(tl.pointer_type(tl.int64), bitcast=True)
    description = described + tl.program_id(0) * _DESCRIPTION
    table = tl.load(addresses + tl.load(description)).to(tl.pointer_type(tl.int32))
    to = table + tl.load(description + 1)
    source = packed + tl.load(description + 2)
    count = tl.load(description + 3).to(tl.int32)
    for offset in range(tl.program_id(1) * CHUNK, count, tl.num_programs(1) * CHUNK):
        place = offset + tl.arange(0, CHUNK)
        inside = place < count
        tl.store(to + place, tl.load(source + place, mask=inside), mask=inside)


def write_pieces(
    addresses: Tensor, tables: Sequence[Tensor], packed: Tensor, num_pieces: int, longest: int
) -> None:
    """See `reference.batch.write_pieces`."""
    if num_pieces == 0:
        return
    programs = min(triton.cdiv(longest, CHUNK), MAX_PROGRAMS_PER_PIECE)
    write_pieces_kernel[(num_pieces, programs)](addresses, packed, CHUNK=CHUNK, num_warps=4)
