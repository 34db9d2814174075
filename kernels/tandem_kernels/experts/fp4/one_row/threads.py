"""Numbers threads, for kernels whose warps multiply by themselves."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def threads_of(WARPS: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Returns the number of each warp [WARPS], and of its threads [WARPS, 32]."""
    THREADS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, THREADS))
    return warp, gl.arange(0, 32, gl.SliceLayout(0, THREADS))[None, :] + (warp * 0)[:, None]
