"""Which expert a program computes, and for which pairs, as each warp finds it by itself.

Lane i of a warp has pair i. One instruction says which lanes have the same number, so that no
program compares pairs with pairs, and none waits for another warp.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MATES = gl.constexpr(
    "{ .reg .pred p; .reg .b32 before, mates, firsts, place; "
    "match.any.sync.b32 mates, $2, 0xffffffff; "
    "mov.u32 before, %lanemask_lt; and.b32 place, mates, before; "
    "setp.eq.b32 p, place, 0; setp.ge.and.s32 p, $2, 0, p; "
    "vote.sync.ballot.b32 firsts, p, 0xffffffff; "
    "and.b32 place, firsts, before; popc.b32 place, place; "
    "mov.b32 $0, mates; selp.b32 $1, place, -1, p; }"
)
_LOWEST_BIT = gl.constexpr("{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }")
_TWO = gl.constexpr((gl.int32, gl.int32))


@gluon.jit
def expert_in_place(
    experts: gl.tensor, place: gl.tensor, num_pairs: gl.tensor, WARPS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Returns the expert that comes in `place` among those that have pairs, by their first ones,
    -1 for none, and a bit for each of its pairs."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    of_pair = gl.load(experts + lane, mask=lane < num_pairs, other=-1)
    mates, number = gl.inline_asm_elementwise(_MATES, "=r,=r,r", [of_pair], _TWO, True, 1)
    own = number == place
    expert = gl.max(gl.where(own, of_pair, -1), axis=0)
    return expert, gl.sum(gl.where(own, mates, 0), axis=0)


@gluon.jit
def pair_of_row(pairs: gl.tensor, row: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Returns which pair is number `row` (0 to 7) of those that have a bit, and whether there is
    one."""
    left = pairs + row * 0
    for i in gl.static_range(7):
        left = gl.where(row > i, left & (left - 1), left)
    pair = gl.inline_asm_elementwise(_LOWEST_BIT, "=r,r", [left], gl.int32, True, 1)
    return pair, left != 0
