"""The loop of a GEMM by weights of four-bit floats: tiles become half precision, and multiply rows.

Outputs of a program may be two strips, each with products of its own. Four warps multiply by 64
outputs at once. Where a product is by 128, it is two instructions with accumulators of their own,
and in some loops ptxas puts a wait behind every instruction (C7515, "wgmma.mma_async instructions
are serialized"), as it does where four warps multiply by more than 64 inputs. By strips of 64, and
in pieces of 64 inputs, nothing waits but for what it needs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gemm.fp4_numbers import fp4_weights, in_order_of_warps
from tandem_kernels.product_precision import precision_of
from tandem_kernels.warpgroup_waits import waits_for_products

_MASKED_ROWS = tl.constexpr(16)
"""Few rows may be real in tiles of at most this many; the others take time to read."""


@triton.jit
def _loaded(
    places: tl.tensor,
    real: tl.tensor,
    real_k: tl.tensor,
    EVEN: tl.constexpr,
    BY_WARP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Loads rows [ROWS, PIECE] in the order of inputs in which warps multiply. EVEN: all inputs
    are real. MASKED: rows that are not are zeros, else whatever is there."""
    if not EVEN:
        mask = real_k
        if MASKED:
            mask &= real[:, None]
        given = tl.load(places, mask=mask, other=0.0)
    elif MASKED:
        given = tl.load(places, mask=real[:, None], other=0.0)
    else:
        given = tl.load(places)
    if BY_WARP:
        given = in_order_of_warps(given)
    return given


@triton.jit
def _strip(
    at: tl.tensor,
    next_part: tl.tensor,
    inside: tl.tensor,
    given: tl.tensor,
    given2: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    gate2: tl.tensor,
    up2: tl.tensor,
    kind: tl.constexpr,
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    GATED: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Adds what a step's rows, and extra ones, give with the tiles of a strip at `at`."""
    by = fp4_weights(
        at, inside, kind, ROW_TILES, COLUMN_TILES, BY_WARP, EVEN, IN_PAIRS, WAITS, TILE
    )
    gate = tl.dot(by, given.T, gate, input_precision=PRECISION)
    if HAS_EXTRA:
        gate2 = tl.dot(by, given2.T, gate2, input_precision=PRECISION)
    if GATED:
        at += next_part
        by = fp4_weights(
            at, inside, kind, ROW_TILES, COLUMN_TILES, BY_WARP, EVEN, IN_PAIRS, False, TILE
        )
        up = tl.dot(by, given.T, up, input_precision=PRECISION)
        if HAS_EXTRA:
            up2 = tl.dot(by, given2.T, up2, input_precision=PRECISION)
    return gate, up, gate2, up2


@triton.jit
def products(
    inputs: tl.tensor,
    inputs2: tl.tensor,
    real: tl.tensor,
    places: tl.tensor,
    next_part: tl.tensor,
    next_strip: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    inner: tl.tensor,
    num_tile_columns: tl.tensor,
    kind: tl.constexpr,
    ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    ROW_TILES: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECE: tl.constexpr,
    UNROLL: tl.constexpr,
    STRIPS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    GATED: tl.constexpr,
    BY_WARP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WAITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Multiplies steps `first` to before `end` of the inner dimension, in products of PIECE inputs.

    Args:
        inputs, inputs2: Addresses of rows [ROWS, PIECE], and of extra ones [EXTRA, PIECE]; those of
            no row are of any other.
        real: Rows that there are, [ROWS].
        places: Addresses of the first tiles of a strip, of gates or of all there is; ups lie
            `next_part` words behind, those of the next strip `next_strip` words, [ROW_TILES, 1, 1].

    Returns:
        [64 * ROW_TILES, ROWS] of gates and of ups, and [64 * ROW_TILES, EXTRA] of both; then the
        same of the next strip. What nothing wants is zero.
    """
    COLUMN_TILES: tl.constexpr = DEPTH // 64
    PIECE_TILES: tl.constexpr = PIECE // 64
    lane = tl.arange(0, PIECE)
    gate = tl.zeros([64 * ROW_TILES, ROWS], tl.float32)
    gate2 = tl.zeros([64 * ROW_TILES, EXTRA], tl.float32)
    up, next_gate, next_up = gate, gate, gate
    up2, next_gate2, next_up2 = gate2, gate2, gate2
    for step in tl.range(first, end, loop_unroll_factor=UNROLL):
        for piece in tl.static_range(DEPTH // PIECE):
            column = step * COLUMN_TILES + piece * PIECE_TILES
            inside = column + tl.arange(0, PIECE_TILES) < num_tile_columns
            real_k = (column * 64 + lane < inner)[None, :]
            given = _loaded(inputs + column * 64, real, real_k, EVEN, BY_WARP, ROWS <= _MASKED_ROWS)
            given2 = given
            if HAS_EXTRA:
                given2 = _loaded(inputs2 + column * 64, real, real_k, EVEN, BY_WARP, False)
            at = places + column * TILE
            gate, up, gate2, up2 = _strip(
                at, next_part, inside, given, given2, gate, up, gate2, up2, kind,
                ROW_TILES, PIECE_TILES, HAS_EXTRA, GATED, BY_WARP, EVEN, IN_PAIRS,
                WAITS and piece == 0, PRECISION, TILE,
            )  # fmt: skip
            if STRIPS > 1:
                at += next_strip
                next_gate, next_up, next_gate2, next_up2 = _strip(
                    at, next_part, inside, given, given2,
                    next_gate, next_up, next_gate2, next_up2, kind,
                    ROW_TILES, PIECE_TILES, HAS_EXTRA, GATED, BY_WARP, EVEN, IN_PAIRS,
                    False, PRECISION, TILE,
                )  # fmt: skip
    return gate, up, gate2, up2, next_gate, next_up, next_gate2, next_up2


def operand_constants(x: Tensor, tiles: Tensor, num_warps: int) -> dict[str, Any]:
    """Returns the constants of a launch that say how weights become an operand for the rows `x`."""
    return {
        "BY_WARP": num_warps < 4,
        "IN_PAIRS": x.is_cuda and x.dtype == torch.bfloat16,
        "WAITS": waits_for_products(x.device, num_warps),
        "PRECISION": precision_of(x),
        "TILE": tiles.shape[-1],
    }
