"""Triangular systems of chunks of 64 tokens, as prompts of delta rules have them: T = (1 + A)^-1.

Each part of 16 tokens writes what A has left of its own block, and in place of that block the
inverse of 1 + it; then T of a chunk is made of these, block by block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.prefill_attention import request_of

CHUNK = 64
PART = 16
"""Tokens whose system is solved row by row; those of a chunk's parts are multiplied."""


@triton.jit
def token_rows(
    start: tl.tensor, token: tl.tensor, inside: tl.tensor, stride: tl.tensor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns rows [CHUNK, BLOCK] of tokens, zero where there is nothing."""
    column = tl.arange(0, BLOCK)
    place = start + token.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(place, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def chunk_of(
    query_start_loc: tl.tensor, tile: tl.tensor, first_req: tl.tensor, num_reqs: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Returns (request, first token, end of its tokens) of chunk `tile`."""
    r = request_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    start = tl.load(query_start_loc + r)
    first = start + (tile - (start - first_req) // CHUNK - (r - first_req)) * CHUNK
    return r, first, tl.load(query_start_loc + r + 1)


@triton.jit
def part_inverse(lower: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """Returns the inverse of 1 + `lower`, which is strictly lower triangular, [PART, PART]."""
    row, column = tl.arange(0, PART)[:, None], tl.arange(0, PART)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for i in range(1, PART):
        own = tl.sum(tl.where(row == i, -lower, 0.0), axis=0)
        solved = tl.sum(own[:, None] * inverse, axis=0)
        inverse += tl.where(row == i, solved[None, :], 0.0)
    return inverse


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _block(
    start: tl.tensor, i: tl.constexpr, j: tl.constexpr, count: tl.tensor,
    CHUNK: tl.constexpr, PART: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns block (i, j) of a chunk's matrix, zero behind its `count` tokens."""
    lane = tl.arange(0, PART)
    place = (i * PART + lane)[:, None] * CHUNK + j * PART + lane[None, :]
    return tl.load(start + place, mask=i * PART < count, other=0.0)


@triton.jit
def _store_block(
    start: tl.tensor, i: tl.constexpr, j: tl.constexpr, block: tl.tensor,
    CHUNK: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, PART)
    place = (i * PART + lane)[:, None] * CHUNK + j * PART + lane[None, :]
    tl.store(start + place, block.to(start.dtype.element_ty))


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def solve_kernel(
    query_start_loc: tl.tensor,
    lower: tl.tensor,
    solved: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    NUM_VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    SOLVER: tl.constexpr,
) -> None:
    """Computes T of chunk i and value head h in program (i, h): T_ij is what is left of the blocks
    of A between parts j and i, times T_ii, with the other sign."""
    tl.static_assert(CHUNK == 4 * PART)
    tile, head = tl.program_id(0), tl.program_id(1)
    _, first, stop = chunk_of(query_start_loc, tile, first_req, num_reqs, CHUNK)
    if first >= stop:
        return
    count = stop - first
    place = (tile.to(tl.int64) * NUM_VALUES + head) * CHUNK * CHUNK
    start, to = lower + place, solved + place
    t00 = _block(start, 0, 0, count, CHUNK, PART)
    t11 = _block(start, 1, 1, count, CHUNK, PART)
    t22 = _block(start, 2, 2, count, CHUNK, PART)
    t33 = _block(start, 3, 3, count, CHUNK, PART)
    a10 = _block(start, 1, 0, count, CHUNK, PART)
    a20 = _block(start, 2, 0, count, CHUNK, PART)
    a21 = _block(start, 2, 1, count, CHUNK, PART)
    a30 = _block(start, 3, 0, count, CHUNK, PART)
    a31 = _block(start, 3, 1, count, CHUNK, PART)
    a32 = _block(start, 3, 2, count, CHUNK, PART)
    t10 = -_product(t11, _product(a10, t00, SOLVER), SOLVER)
    t21 = -_product(t22, _product(a21, t11, SOLVER), SOLVER)
    t32 = -_product(t33, _product(a32, t22, SOLVER), SOLVER)
    rest = _product(a20, t00, SOLVER) + _product(a21, t10, SOLVER)
    t20 = -_product(t22, rest, SOLVER)
    rest = _product(a31, t11, SOLVER) + _product(a32, t21, SOLVER)
    t31 = -_product(t33, rest, SOLVER)
    rest = _product(a30, t00, SOLVER) + _product(a31, t10, SOLVER) + _product(a32, t20, SOLVER)
    t30 = -_product(t33, rest, SOLVER)
    nothing = tl.zeros([PART, PART], tl.float32)
    _store_block(to, 0, 0, t00, CHUNK, PART)
    _store_block(to, 1, 0, t10, CHUNK, PART)
    _store_block(to, 1, 1, t11, CHUNK, PART)
    _store_block(to, 2, 0, t20, CHUNK, PART)
    _store_block(to, 2, 1, t21, CHUNK, PART)
    _store_block(to, 2, 2, t22, CHUNK, PART)
    _store_block(to, 3, 0, t30, CHUNK, PART)
    _store_block(to, 3, 1, t31, CHUNK, PART)
    _store_block(to, 3, 2, t32, CHUNK, PART)
    _store_block(to, 3, 3, t33, CHUNK, PART)
    for i in tl.static_range(3):
        for j in tl.static_range(i + 1, 4):
            _store_block(to, i, j, nothing, CHUNK, PART)
