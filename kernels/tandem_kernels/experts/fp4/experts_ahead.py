"""Multiplies many rows by experts in four-bit floats on Hopper, while what comes next is made.

    copies      rows and weights of step s + 5
    products    first outputs of s    | second outputs of s      | first outputs of s + 1
    weights     second of s widened   | first of s + 1 widened   | second of s + 1 widened

An expert's rows are equal tiles of at most 128 (`expert_tiles`): weights are widened once for as
many rows as registers have room for, and few places are empty. A program takes one unit after the
other, a tile of rows times one of outputs, and copies go on from one to the next. Products of one
half run while weights of the other half become half precision, in registers of their own.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_init,
)

from tandem_kernels.device import num_programs
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.ahead_gate import activated
from tandem_kernels.experts.fp4.ahead_products import begin, ended, loaded, widened
from tandem_kernels.experts.fp4.expert_tiles import PLACES, ExpertTiles

_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Has another name from Triton 3.9 on."""
_STAGES = 6


@gluon.jit
def _unit(
    pairs: gl.tensor,
    tiles: gl.tensor,
    weight: gl.tensor,
    unit: gl.tensor,
    num_units: gl.tensor,
    columns: gl.tensor,
    num_pairs: gl.tensor,
    x_stride: gl.tensor,
    expert_size: gl.tensor,
    column_size: gl.tensor,
    lane: gl.tensor,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    PLACES: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Returns a unit's tile and column, how many rows it has, where they begin, and where its
    weights do. Behind the last unit is the last one again."""
    unit = gl.maximum(gl.minimum(unit, num_units - 1), 0)
    tile = unit // columns
    column = unit % columns
    pair = gl.load(pairs + tile * PLACES + lane)
    row = gl.where(pair < num_pairs, pair, 0)
    if GATED:
        row = row // TOP_K
    expert = gl.load(tiles + 2 * tile + 2).to(gl.int64)
    height = gl.load(tiles + 2 * tile + 3)
    return (
        tile,
        column,
        height,
        row * x_stride,
        weight + expert * expert_size + column * column_size,
    )


@gluon.jit
def _copy(
    x: gl.tensor,
    memory: gl.tuple,
    slot: gl.tensor,
    step: gl.tensor,
    height: gl.tensor,
    rows: gl.tensor,
    weights: gl.tensor,
    lanes: gl.tuple,
    TILE: gl.constexpr,
) -> None:
    """Begins to copy a step's rows and weights; places of no row keep what they have."""
    row_memory, word_memory, scale_memory = memory
    lane, piece, word, scale = lanes
    from_rows = (x + step * 64) + (rows[:, None] + piece[None, :])
    _copy_to_shared(row_memory.index(slot), from_rows, mask=(lane < height)[:, None])
    _copy_to_shared(word_memory.index(slot), weights + step * TILE + word)
    _copy_to_shared(scale_memory.index(slot), weights + step * TILE + scale)
    async_copy.commit_group()


@gluon.jit
def _multiply(
    x: gl.tensor,
    memory: gl.tuple,
    slot: gl.tensor,
    ready: gl.tuple,
    steps: gl.tensor,
    own: gl.tuple,
    following: gl.tuple,
    lanes: gl.tuple,
    N: gl.constexpr,
    N2: gl.constexpr,
    STAGES: gl.constexpr,
    TILE: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Multiplies a unit, of N + N2 rows at most, whose first weights are `ready`. Returns the sums
    of both halves of its outputs, the next unit's first weights, and their place."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    SUMS2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N2 or 16, 16])
    LEFT: gl.constexpr = 1 + (N2 > 0)
    row_memory, word_memory, scale_memory = memory
    height, rows, weights = own
    next_height, next_rows, next_weights = following
    zeros = gl.zeros([128, N], gl.float32, SUMS)
    zeros2 = gl.zeros([128, N2 or 16], gl.float32, SUMS2)
    first, running = (zeros, zeros2), (warpgroup_mma_init(zeros), zeros2)
    if N2 > 0:
        running = (running[0], warpgroup_mma_init(zeros2))
    for step in range(steps):
        given = row_memory.index(slot)
        front, behind = loaded(word_memory.index(slot), scale_memory.index(slot), 1)
        begun = begin(ready[0], given, first, 0, N, N2)
        second = ended(running, LEFT, N2)
        other = widened(front)
        begun = begin(ready[1], given, begun, 32, N, N2)
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        # The place in front is free: all have seen the end of what was multiplied there.
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        ahead = step + STAGES - 1
        is_own = ahead < steps
        _copy(
            x, memory, free, gl.where(is_own, ahead, ahead - steps),
            gl.where(is_own, height, next_height), gl.where(is_own, rows, next_rows),
            gl.where(is_own, weights, next_weights), lanes, TILE,
        )  # fmt: skip
        running = begin(other, given, second, 0, N, N2)
        other = widened(behind)
        front, behind = loaded(word_memory.index(slot), scale_memory.index(slot), 0)
        running = begin(other, given, running, 32, N, N2)
        first = ended(begun, 2 * LEFT, N2)
        ready = (widened(front), widened(behind))
    second = ended(running, 0, N2)
    return first, second, ready, slot


@gluon.jit
def _write(
    first: gl.tensor,
    second: gl.tensor,
    written: gl.tuple,
    FIRST: gl.constexpr,
    GATED: gl.constexpr,
    GATE: gl.constexpr,
) -> None:
    """Writes sums [COLS, N] of a tile's pairs, FIRST and on: gates and ups activated, or both
    halves of the outputs times the pairs' weights."""
    out, pairs, column, pair_weights, num_pairs, num_outputs, limit = written
    pairs += FIRST
    COLS: gl.constexpr = first.shape[0]
    N: gl.constexpr = first.shape[1]
    WRITTEN: gl.constexpr = gl.BlockedLayout([8, 1], [COLS // 8, 256 // COLS], [1, 8], [0, 1])
    pair = gl.load(pairs + gl.arange(0, N, gl.SliceLayout(0, WRITTEN)))
    real = (pair < num_pairs)[None, :]
    lane = gl.arange(0, COLS, gl.SliceLayout(1, WRITTEN))
    place = out + (pair.to(gl.int64) * num_outputs)[None, :] + lane[:, None]
    if GATED:
        found = activated(first, second, limit, GATE).to(out.dtype.element_ty)
        gl.store(place + column * COLS, gl.convert_layout(found, WRITTEN), mask=real)
    else:
        own = gl.load(pairs + gl.arange(0, N, gl.SliceLayout(0, first.type.layout)))
        weight = gl.load(pair_weights + own, mask=own < num_pairs, other=0.0)[None, :]
        found = gl.convert_layout((first * weight).to(out.dtype.element_ty), WRITTEN)
        gl.store(place + column * (2 * COLS), found, mask=real)
        found = gl.convert_layout((second * weight).to(out.dtype.element_ty), WRITTEN)
        gl.store(place + column * (2 * COLS) + COLS, found, mask=real)


@gluon.jit
def _compute(
    x: gl.tensor,
    memory: gl.tuple,
    slot: gl.tensor,
    ready: gl.tuple,
    steps: gl.tensor,
    own: gl.tuple,
    following: gl.tuple,
    lanes: gl.tuple,
    written: gl.tuple,
    N: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, GATE: gl.constexpr, TILE: gl.constexpr,
) -> tuple[gl.tuple, gl.tensor]:  # fmt: skip
    """Multiplies and writes a unit; see `_multiply`, and `_write` for `written`."""
    first, second, ready, slot = _multiply(
        x, memory, slot, ready, steps, own, following, lanes, N, N2, STAGES, TILE
    )
    _write(first[0], second[0], written, 0, GATED, GATE)
    if N2 > 0:
        _write(first[1], second[1], written, N, GATED, GATE)
    return ready, slot


@gluon.jit
def _lanes(
    row_size: gl.tensor,
    half_size: gl.tensor,
    PLACES: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Returns what of a step each thread copies: rows and which inputs, words of weights, and of
    scales, whose second half lies `half_size` behind."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 8], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    lane = gl.arange(0, PLACES, gl.SliceLayout(1, ROWS))
    piece = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    tile = gl.arange(0, 4, gl.SliceLayout(1, WORDS))
    begins = tile % 2 * row_size + tile // 2 * half_size
    word = begins[:, None] + gl.arange(0, 512, gl.SliceLayout(0, WORDS))[None, :]
    tile = gl.arange(0, 4, gl.SliceLayout(1, SCALES))
    begins = tile % 2 * row_size + tile // 2 * half_size + 512
    scale = begins[:, None] + gl.arange(0, 32, gl.SliceLayout(0, SCALES))[None, :]
    return lane, piece, word, scale


@gluon.jit(do_not_specialize=["num_pairs"])
def fp4_experts_ahead_kernel(
    x: gl.tensor,
    weight: gl.tensor,
    pair_weights: gl.tensor,
    pairs: gl.tensor,
    tiles: gl.tensor,
    out: gl.tensor,
    num_pairs: gl.tensor,
    num_outputs: gl.tensor,
    num_tile_rows: gl.tensor,
    num_tile_columns: gl.tensor,
    x_stride: gl.tensor,
    limit: gl.tensor,
    TOP_K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, GATE: gl.constexpr,
    PLACES: gl.constexpr, TILE: gl.constexpr,
) -> None:  # fmt: skip
    """Computes units p, p + programs and so on in program p; unit u is the tile u // columns of
    rows, and u % columns of outputs. Arguments are those of `fp4_expert_gemm_kernel`."""
    kind: gl.constexpr = x.dtype.element_ty
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PLACES, 64], kind)
    row_memory = gl.allocate_shared_memory(kind, [STAGES, PLACES, 64], of_rows)
    word_memory = gl.allocate_shared_memory(gl.int32, [STAGES, 4, 512], plain)
    scale_memory = gl.allocate_shared_memory(gl.int32, [STAGES, 4, 32], plain)
    memory = (row_memory, word_memory, scale_memory)
    row_size = num_tile_columns * TILE
    half_size = row_size * 2
    expert_size = row_size * num_tile_rows
    column_size = row_size * 4
    columns = num_tile_rows // 4
    if GATED:
        column_size = half_size
        half_size = expert_size
        expert_size = expert_size * 2
        columns = num_tile_rows // 2
    lanes = _lanes(row_size, half_size, PLACES)
    num_units = gl.load(tiles) * columns
    tile, column, height, rows, weights = _unit(
        pairs, tiles, weight, gl.program_id(0), num_units, columns, num_pairs, x_stride,
        expert_size, column_size, lanes[0], TOP_K, GATED, PLACES,
    )  # fmt: skip
    for step in gl.static_range(STAGES - 1):
        _copy(x, memory, step, step, height, rows, weights, lanes, TILE)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    front, behind = loaded(word_memory.index(0), scale_memory.index(0), 0)
    ready = (widened(front), widened(behind))
    slot = gl.program_id(0) * 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        next_tile, next_column, next_height, next_rows, next_weights = _unit(
            pairs, tiles, weight, unit + gl.num_programs(0), num_units, columns, num_pairs,
            x_stride, expert_size, column_size, lanes[0], TOP_K, GATED, PLACES,
        )  # fmt: skip
        own = (height, rows, weights)
        following = (next_height, next_rows, next_weights)
        of_tile = pairs + tile * PLACES
        written = (out, of_tile, column, pair_weights, num_pairs, num_outputs, limit)
        if height <= 64:
            ready, slot = _compute(
                x, memory, slot, ready, num_tile_columns, own, following, lanes, written,
                64, 0, STAGES, GATED, GATE, TILE,
            )  # fmt: skip
        elif height <= 96:
            ready, slot = _compute(
                x, memory, slot, ready, num_tile_columns, own, following, lanes, written,
                64, 32, STAGES, GATED, GATE, TILE,
            )  # fmt: skip
        else:
            ready, slot = _compute(
                x, memory, slot, ready, num_tile_columns, own, following, lanes, written,
                128, 0, STAGES, GATED, GATE, TILE,
            )  # fmt: skip
        tile, column, height = next_tile, next_column, next_height
        rows, weights = next_rows, next_weights
    async_copy.wait_group(0)


def fp4_experts_ahead(
    x: Tensor,
    weight: Tensor,
    pair_weights: Tensor,
    rows: ExpertTiles,
    out: Tensor,
    gate: GateForm | None = None,
) -> None:
    """Computes one of the two GEMMs where `multiplies_ahead`; see `fp4_expert_gemm`."""
    num_pairs, num_outputs = out.shape
    _, num_parts, num_tile_rows, num_tile_columns, tile_words = weight.shape
    limit, _ = gate_arguments(gate)
    fp4_experts_ahead_kernel[(num_programs(x.device, 1),)](
        x,
        weight,
        pair_weights,
        rows.pairs,
        rows.tiles,
        out,
        num_pairs,
        num_outputs,
        num_tile_rows,
        num_tile_columns,
        x.stride(0),
        limit,
        TOP_K=pair_weights.shape[1],
        STAGES=_STAGES,
        GATED=num_parts == 2,
        GATE=gate_code(gate) if num_parts == 2 else 0,
        PLACES=PLACES,
        TILE=tile_words,
        num_warps=8,
    )
