"""Products of weights of four-bit floats and rows, begun here and ended elsewhere.

Eight warps have 128 outputs, four of them 64. A half of a step's weights is 64 inputs, whose words
are loaded at once and widened 32 at a time, so that products run in between.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tandem_kernels.gemm.fp4_numbers import UNPACKED, UNPACKED_REGISTERS

_SIXTEEN = gl.constexpr((gl.bfloat16,) * 16)
_WARPS = gl.constexpr(8)


@gluon.jit
def _joined(
    a: gl.tensor, b: gl.tensor, c: gl.tensor, d: gl.tensor,
    e: gl.tensor, f: gl.tensor, g: gl.tensor, h: gl.tensor,
) -> gl.tensor:  # fmt: skip
    """Does what `fp4_numbers._joined` does."""
    low = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.join(low, gl.join(gl.join(e, f), gl.join(g, h)))


@gluon.jit
def loaded(
    words: gl.shared_memory_descriptor, scales: gl.shared_memory_descriptor, HALF: gl.constexpr
) -> tuple[gl.tensor, ...]:
    """Loads one half of a step's weights, 128 outputs: for 32 inputs and 32 more each the words of
    both sides and their powers, [64, 4]. Threads load what becomes their own numbers: nothing is
    exchanged."""
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]], [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]], [[0, 64], [0, 128], [1, 0]], [],
        [2, 256],
    )  # fmt: skip
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [1, 0]], [], [2, 32]
    )
    # Lines of one row of both sides, four words of 32 inputs, and two times 32 inputs.
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0], [32, 0, 0]], [], [64, 4, 2],
    )  # fmt: skip
    own = words.slice(2 * HALF, 2, dim=0)
    first = own.slice(0, 256, dim=1).load(WORDS).reshape([64, 4, 2])
    second = own.slice(256, 256, dim=1).load(WORDS).reshape([64, 4, 2])
    first, second = gl.convert_layout(first, OWN), gl.convert_layout(second, OWN)
    scale = scales.slice(2 * HALF, 2, dim=0).load(SCALES).reshape([64])
    scale = gl.convert_layout(scale, gl.SliceLayout(1, gl.SliceLayout(2, OWN)))
    shift = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, OWN))) * 16
    scale = gl.expand_dims(gl.expand_dims(scale, 1), 2)
    shift = gl.expand_dims(gl.expand_dims(shift, 0), 1)
    powers, _ = gl.broadcast(((scale >> shift) & 255) * 0x00800080, first)
    powers2, _ = gl.broadcast(((scale >> (shift + 8)) & 255) * 0x00800080, first)
    first, first_behind = gl.split(first)
    second, second_behind = gl.split(second)
    powers, powers_behind = gl.split(powers)
    powers2, powers2_behind = gl.split(powers2)
    front = (first, second, powers, powers2)
    return front, (first_behind, second_behind, powers_behind, powers2_behind)


@gluon.jit
def widened(words: gl.tuple) -> gl.tensor:
    """Returns 32 inputs of weights in bf16, [128, 32], as products take them."""
    first, second, powers, powers2 = words
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, 64, 16])
    numbers = gl.inline_asm_elementwise(
        UNPACKED, UNPACKED_REGISTERS, [first, second, powers, powers2], _SIXTEEN, True, 1
    )
    a, b, c, d, e, f, g, h, a2, b2, c2, d2, e2, f2, g2, h2 = numbers
    both = gl.join(_joined(a, b, c, d, e, f, g, h), _joined(a2, b2, c2, d2, e2, f2, g2, h2))
    both = both.reshape([8, 8, 4, 2, 2, 2, 2]).permute([0, 6, 1, 5, 4, 2, 3])
    return gl.convert_layout(both.reshape([128, 32]), gl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def begin(
    weights: gl.tensor,
    rows: gl.shared_memory_descriptor,
    sums: gl.tuple,
    K: gl.constexpr,
    N: gl.constexpr,
    N2: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Begins the products of 32 inputs of weights, of which K is the first, and a step's rows: N of
    them, and N2 behind."""
    acc, acc2 = sums
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, N, 16])
    own = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
    given = rows.slice(0, N, dim=0).slice(K, 32, dim=1).permute((1, 0))
    acc = warpgroup_mma(own, given, acc, is_async=True)
    if N2 > 0:
        SUMS2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, N2 or 16, 16])
        own2 = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS2, 2))
        given2 = rows.slice(N, N2 or 16, dim=0).slice(K, 32, dim=1).permute((1, 0))
        acc2 = warpgroup_mma(own2, given2, acc2, is_async=True)
    return acc, acc2


@gluon.jit
def ended(sums: gl.tuple, LEFT: gl.constexpr, N2: gl.constexpr) -> tuple[gl.tensor, ...]:
    """Returns sums when all products but the last LEFT have ended."""
    acc, acc2 = sums
    if N2 > 0:
        acc, acc2 = warpgroup_mma_wait(LEFT, deps=(acc, acc2))
    else:
        acc = warpgroup_mma_wait(LEFT, deps=(acc,))
    return acc, acc2
