"""The line of tiles of `decode_line`, for kernels that lay out their registers themselves. Warps
that copy and warps that multiply each find their run."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon.jit
def own_run(
    seq_lens: gl.tensor, num_reqs: gl.tensor, ROW_TILES: gl.constexpr, TILE: gl.constexpr,
    REQS: gl.constexpr, num_warps: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Returns the ends of the requests' stretches of the line, [REQS], and where this program's run
    begins and ends; see `decode_line`. Cuts as `aligned_run` there does: `merge_kernel` looks for
    parts where that says they are."""
    EACH: gl.constexpr = (REQS + 31) // 32
    REQUESTS: gl.constexpr = gl.BlockedLayout([EACH], [32], [num_warps], [0])
    r = gl.arange(0, REQS, REQUESTS)
    tiles = gl.cdiv(gl.load(seq_lens + r, mask=r < num_reqs, other=0), TILE)
    longest = gl.max(tiles, axis=0)
    tiles *= ROW_TILES
    length = gl.sum(tiles, axis=0)
    run = gl.cdiv(length, gl.num_programs(0))
    parts = gl.maximum(longest // gl.maximum(run, 1), 1)
    aligned = gl.maximum(gl.cdiv(longest, parts), run)
    run = gl.where(3 * aligned <= 4 * run, aligned, run)
    here = gl.program_id(0) * run
    return gl.associative_scan(tiles, 0, _add), here, gl.minimum(here + run, length)


@gluon.jit
def stretch(
    ends: gl.tensor, here: gl.tensor, end: gl.tensor, seq_lens: gl.tensor, TILE: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Returns of what lies at `here` the request, its length, its tiles, its tile of rows, and the
    first tile and the last one that are walked before `end`; at `end` itself numbers that mean
    nothing."""
    before = ends <= here
    r = gl.sum(before.to(gl.int32), axis=0)
    begin = gl.max(gl.where(before, ends, 0), axis=0)
    seq_len = gl.load(seq_lens + r, mask=here < end, other=1)
    tiles = gl.cdiv(seq_len, TILE)
    first = (here - begin) % tiles
    return r, seq_len, tiles, (here - begin) // tiles, first, gl.minimum(tiles, first + end - here)
