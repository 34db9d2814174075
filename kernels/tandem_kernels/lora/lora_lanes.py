"""Several slots in one product: each has lanes of its own.

rows x lanes [16, slots * r]     a row's numbers stand in the lanes of its slot; zeros elsewhere
lanes x cols                     B of all slots that any row has; others are not loaded
"""

from __future__ import annotations

import triton
import triton.language as tl

_LANES = 128


def slots_at_once(num_slots: int, rank: int) -> int:
    """Returns how many slots one product has."""
    most = max(1, _LANES // rank)
    return max(16 // rank, min(most, 1 << (num_slots - 1).bit_length()))


@triton.jit
def has_slot(slots: tl.tensor, first: tl.tensor, SLOTS: tl.constexpr) -> tl.tensor:
    """Returns whether a row has a slot, [ROWS, SLOTS]."""
    return slots[:, None] == (first + tl.arange(0, SLOTS))[None, :]


@triton.jit
def factors_of(
    b: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    slot_stride: tl.tensor,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
) -> tl.tensor:
    """Returns B of SLOTS slots for columns, [COLS, SLOTS * RANK]; zeros for slots of no row."""
    present = tl.max(has_slot(slots, first, SLOTS).to(tl.int32), 0) > 0
    slot = (first + tl.arange(0, SLOTS)).to(tl.int64) * slot_stride
    lane = tl.arange(0, RANK)
    at = slot[None, :, None] + col.to(tl.int64)[:, None, None] * RANK + lane[None, None, :]
    real = (col < end)[:, None, None] & present[None, :, None]
    factors = tl.load(b + at, mask=real, other=0.0)
    return factors.reshape(col.shape[0], SLOTS * RANK)


@triton.jit
def in_lanes(
    sums: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
) -> tl.tensor:
    """Returns each row's numbers in the lanes of its slot, [ROWS, SLOTS * RANK]."""
    own = has_slot(slots, first, SLOTS)[:, :, None]
    spread = tl.where(own, sums[:, None, :], 0.0)
    return spread.reshape(sums.shape[0], SLOTS * RANK)


@triton.jit
def with_slots(
    acc: tl.tensor,
    given: tl.tensor,
    by: tl.tensor,
    slots: tl.tensor,
    b: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    b_stride: tl.tensor,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Returns the sum of `acc` and `given` by B of each row's slot. `by` is B of the first ones."""
    given = given.to(by.dtype)
    for first in tl.static_range(0, SLOTS, AT_ONCE):
        if first > 0:
            by = factors_of(b, slots, first, col, end, b_stride, AT_ONCE, RANK)
        made = in_lanes(given, slots, first, AT_ONCE, RANK)
        acc = tl.dot(made, tl.trans(by), acc, input_precision=PRECISION)
    return acc
