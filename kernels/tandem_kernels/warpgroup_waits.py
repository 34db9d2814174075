"""Waits for products of four warps (wgmma), which run on while their warps do other things.

    products begin ── read their first operand from registers ── end
                 warps go on: ── next operand is computed ──┐
                                                            └ may its registers be written yet?

Triton does not ask: in a loop whose first operand is computed, what the next turn computes may land
in registers that products of this turn have still to read (triton-lang/triton#9433; we saw it with
3.6 and 3.7). Results were wrong where more programs shared an SM, and right by luck elsewhere.
ptxas keeps the registers of products untouched up to a wait that it sees, so such a loop has one.
`tests/kernels/registers_in_flight.py` reads the compiled code of all kernels for this fault.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.device import has_warpgroup_mma

_WAIT = tl.constexpr(
    "wgmma.wait_group.sync.aligned 0;"
    "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;"
)


def waits_for_products(device: torch.device, num_warps: int) -> bool:
    """Returns whether products run on while this many warps of a program do other things."""
    return num_warps >= 4 and has_warpgroup_mma(device)


@triton.jit
def after_products(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns both, of int32 and one shape, when all products that these warps began have ended;
    Hopper alone, and four warps or eight.

    The operand must be computed from what this returns. To the compiler the wait is pure: behind an
    effect it would not look for the order of lanes in which the operand needs no exchange.
    """
    first, second = tl.inline_asm_elementwise(
        _WAIT, "=r,=r,=r,=r,r,r,r,r", [first, second], (tl.int32, tl.int32), True, 2
    )
    return first, second
