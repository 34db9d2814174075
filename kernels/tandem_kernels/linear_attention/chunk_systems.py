"""Triangular systems of chunks of 64 tokens, as prompts of delta rules have them: T = (1 + A)^-1.

    (1 + A)^-1, two blocks each:   T0                          A01: what A has left of
                                  -T1 A10 T0    T1             the diagonal blocks T0, T1

Blocks of 16 tokens are solved row by row, all four side by side; the inverse of two neighbours of
them is made of theirs, twice, by products of whole matrices in which all else is zero. A row is
needed by all rows below it, so that a thread has columns of its own, and takes from memory what
they are multiplied by. No power of A is formed: where tokens are alike, T is small, and they are
not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.prefill_attention import request_of

CHUNK = 64
PART = 16
"""Tokens whose system is solved row by row; those of a chunk's parts are multiplied."""
_LEAST = tl.constexpr(-(2**31))


def solver_width(num_warps: int, columns: int = CHUNK) -> int:
    """Returns the columns of all parts, repeated until each thread of a program has one."""
    return max(columns, 32 * num_warps)


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
    stop = tl.load(query_start_loc + r + 1)
    # Decodes in front, which have several tokens each, leave tiles that are no request's.
    return r, tl.where(first < start, stop, first), stop


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Multiplies float32 matrices; for inputs of half precision, with what rounding to these
    leaves of them once more rounded, which is some 16 bits."""
    if kind == tl.float32:
        found = tl.dot(a, b, input_precision="ieee")
    else:
        a_high, b_high = a.to(kind), b.to(kind)
        a_low = (a - a_high.to(tl.float32)).to(kind)
        b_low = (b - b_high.to(tl.float32)).to(kind)
        found = tl.dot(a_low, b_high)
        found = tl.dot(a_high, b_low, found)
        found = tl.dot(a_high, b_high, found)
    return found


@triton.jit
def _row_of(x: tl.tensor, i: tl.constexpr) -> tl.tensor:
    """Returns row i of float32 [rows, columns]. A maximum with the least integer is no operation,
    where a sum with zero is one."""
    row = tl.arange(0, x.shape[0])[:, None]
    bits = tl.where(row == i, x.to(tl.int32, bitcast=True), _LEAST)
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def part_inverses(
    system: tl.tensor,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Returns the inverses of 1 + the own blocks of A [CHUNK, CHUNK] in memory of COLUMNS // PART
    parts, side by side: [PART, WIDTH], from column COLUMNS on once more."""
    row = tl.arange(0, PART)[:, None]
    column = tl.arange(0, WIDTH)[None, :] % COLUMNS
    inverse = tl.where(row == column % PART, 1.0, 0.0)
    own = system + column // PART * (PART * CHUNK + PART) + row * CHUNK
    for j in tl.static_range(PART - 1):
        factor = tl.load(own + j, mask=row > j, other=0.0)
        inverse -= factor * _row_of(inverse, j)[None, :]
    return inverse


@triton.jit
def solve(
    system: tl.tensor,
    scratch: tl.tensor,
    kind: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Returns T of A [CHUNK, CHUNK], which is strictly lower triangular and float32.

    Args:
        scratch: As much memory as A has, this program's own.
        kind: Dtype of the inputs, which T is rounded to.
        WIDTH: See `solver_width`.
    """
    lane = tl.arange(0, CHUNK)
    part = lane // PART
    whole = scratch + lane[:, None] * CHUNK + lane[None, :]
    is_own = part[:, None] == part[None, :]
    tl.store(whole, system, mask=is_own)
    tl.debug_barrier()
    inverses = part_inverses(scratch, CHUNK, CHUNK, PART, WIDTH)
    inverses = tl.reshape(inverses, [PART, WIDTH // CHUNK, CHUNK])
    is_first = tl.arange(0, WIDTH // CHUNK)[None, :, None] == 0
    inverses = tl.sum(tl.where(is_first, inverses, 0.0), axis=1)
    solution = tl.broadcast_to(inverses[None, :, :], [CHUNK // PART, PART, CHUNK])
    solution = tl.where(is_own, tl.reshape(solution, [CHUNK, CHUNK]), 0.0)
    return join_parts(solution, system, kind, CHUNK, PART)


@triton.jit
def join_parts(
    solution: tl.tensor,
    system: tl.tensor,
    kind: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """Returns T of A: `solution` has the inverses of parts on its diagonal, and zeros elsewhere;
    `system` has A between parts, and anything on its diagonal."""
    tl.static_assert(CHUNK == 4 * PART)
    part, half = tl.arange(0, CHUNK) // PART, tl.arange(0, CHUNK) // (2 * PART)
    is_near = (half[:, None] == half[None, :]) & (part[:, None] > part[None, :])
    rest = _product(solution, tl.where(is_near, system, 0.0), kind)
    solution -= _product(rest, solution, kind)
    is_far = half[:, None] > half[None, :]
    rest = _product(solution, tl.where(is_far, system, 0.0), kind)
    return solution - _product(rest, solution, kind)
