"""Multiplies many rows by experts in e4m3 on Hopper, by warps that do nothing else.

    one warp          asks the copy engine for rows and weights, four steps ahead
    four warps        multiply the first 64 rows of a tile
    four warps        multiply the other 64, while the first scale and sum what they have

A step is 128 of the inner dimension, whose products are scaled and summed in float32: tensor cores
keep few bits of sums of e4m3 (DeepSeek-V3, 2024). Warps tell each other by barriers in shared
memory what is there, and what has been read. A program takes one unit after the other, a tile of
rows times one of outputs, and copies go on from one to the next. Rows are sorted by expert
(`sorted_rows`), and so is what the first GEMM makes of them, in e4m3.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem_kernels.device import num_programs
from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.ahead_gate import activated
from tandem_kernels.experts.fp8.ahead_shapes import COLS
from tandem_kernels.experts.fp8.sorted_rows import SortedTiles

_copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Has another name from Triton 3.9 on."""
_STAGES = 4
_MULTIPLIER_REGISTERS, _COPIER_REGISTERS = 224, 56
"""Threads have as many; with those of the first four warps they fill an SM."""

TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def _unit(
    tiles: gl.tensor, unit: gl.tensor, columns: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Returns a unit's tile, column, expert, first place, and how many rows it has."""
    tile = unit // columns
    of_tile = tiles + 3 * tile
    return (
        tile, unit % columns, gl.load(of_tile + 1), gl.load(of_tile + 2), gl.load(of_tile + 3),
    )  # fmt: skip


@gluon.jit
def _copy(given: gl.tuple, sizes: gl.tuple, STAGES: gl.constexpr, GATED: gl.constexpr) -> None:
    """Asks for the rows and weights of all steps of this program's units."""
    x, weight, tiles, row_memory, weight_memory, full, empty = given[:7]
    steps, columns, num_outputs = sizes[:3]
    num_units = gl.load(tiles) * columns
    count = gl.program_id(0) * 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        _, column, expert, start, _ = _unit(tiles, unit, columns)
        if GATED:
            first = expert * 2 * num_outputs + column * 128
            second = first + num_outputs
        else:
            first = expert * num_outputs + column * 256
            second = first + 128
        for step in range(steps):
            slot = count % STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), count // STAGES & 1 ^ 1)
            mbarrier.expect(ready, 3 * 128 * 128)
            k = step * 128
            _copy_tile(x, [start, k], ready, row_memory.index(slot * 2))
            _copy_tile(x, [start + 64, k], ready, row_memory.index(slot * 2 + 1))
            _copy_tile(weight, [first, k], ready, weight_memory.index(slot * 2))
            _copy_tile(weight, [second, k], ready, weight_memory.index(slot * 2 + 1))
            count += 1


@gluon.jit
def _multiplied(
    memory: gl.tuple,
    count: gl.tensor,
    steps: gl.tensor,
    shares: gl.tuple,
    scales: gl.tuple,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    SUMS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Returns the sums of both halves of a unit's outputs, for its rows 64 * HALF and on, and how
    many steps there have been.

    Args:
        shares: Where the scales of these rows are, how far from one group to the next, and which
            rows there are.
        scales: With BLOCKS, where those of the weights' blocks are, of both halves.
    """
    row_memory, weight_memory, full, empty = memory
    of_rows, apart, real = shares
    of_first, of_second = scales
    sums = gl.zeros([64, 128], gl.float32, SUMS)
    first = gl.zeros([64, 128], gl.float32, SUMS)
    second = gl.zeros([64, 128], gl.float32, SUMS)
    share = gl.load(of_rows, mask=real, other=0.0)
    scale, scale2 = 1.0, 1.0
    if BLOCKS:
        scale, scale2 = gl.load(of_first), gl.load(of_second)
    for step in range(steps):
        slot = count % STAGES
        # Scales are loaded a step ahead.
        after = gl.minimum(step + 1, steps - 1)
        next_share = gl.load(of_rows + after * apart, mask=real, other=0.0)
        next_scale, next_scale2 = 1.0, 1.0
        if BLOCKS:
            next_scale, next_scale2 = gl.load(of_first + after), gl.load(of_second + after)
        mbarrier.wait(full.index(slot), count // STAGES & 1)
        given = row_memory.index(slot * 2 + HALF)
        by = weight_memory.index(slot * 2).permute((1, 0))
        begun = warpgroup_mma(given, by, sums, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, (begun,))
        first += sums * (share * scale)[:, None]
        by = weight_memory.index(slot * 2 + 1).permute((1, 0))
        begun = warpgroup_mma(given, by, sums, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, (begun,))
        mbarrier.arrive(empty.index(slot), count=1)
        second += sums * (share * scale2)[:, None]
        share, scale, scale2 = next_share, next_scale, next_scale2
        count += 1
    return first, second, count


@gluon.jit
def _write_hidden(
    first: gl.tensor,
    second: gl.tensor,
    place: gl.tensor,
    real: gl.tensor,
    start: gl.tensor,
    height: gl.tensor,
    column: gl.tensor,
    given: gl.tuple,
    sizes: gl.tuple,
    HALF: gl.constexpr,
    GATE: gl.constexpr,
    WRITTEN: gl.constexpr,
) -> None:
    """Writes activated sums in e4m3, and a scale of each row."""
    out, out_scales = given[9:]
    num_outputs, out_scales_stride, limit = sizes[2], sizes[4], sizes[5]
    total = activated(first, second, limit, GATE)
    largest = gl.max(gl.abs(total), axis=1)
    scale = gl.where(largest > 0, largest / 448.0, 1.0)
    gl.store(out_scales + column * out_scales_stride + place, scale, mask=real)
    scaled = total / scale[:, None]
    numbers = gl.minimum(gl.maximum(scaled, -448.0), 448.0).to(gl.float8e4nv)
    row = gl.arange(0, 64, gl.SliceLayout(1, WRITTEN)) + 64 * HALF
    lane = gl.arange(0, 128, gl.SliceLayout(0, WRITTEN))
    to = out + ((start + row).to(gl.int64) * num_outputs)[:, None] + (column * 128 + lane)[None, :]
    gl.store(to, gl.convert_layout(numbers, WRITTEN), mask=(row < height)[:, None])


@gluon.jit
def _write_parts(
    first: gl.tensor,
    second: gl.tensor,
    place: gl.tensor,
    real: gl.tensor,
    start: gl.tensor,
    height: gl.tensor,
    column: gl.tensor,
    given: gl.tuple,
    sizes: gl.tuple,
    HALF: gl.constexpr,
    WRITTEN: gl.constexpr,
) -> None:
    """Writes sums times their pairs' weights, each where its pair has its own row."""
    order, pair_weights, out = given[7:10]
    num_outputs = sizes[2]
    pair = gl.load(order + place, mask=real, other=0)
    weight = gl.load(pair_weights + pair, mask=real, other=0.0)[:, None]
    row = gl.arange(0, 64, gl.SliceLayout(1, WRITTEN)) + 64 * HALF
    written = row < height
    lane = gl.arange(0, 128, gl.SliceLayout(0, WRITTEN))
    pair = gl.load(order + start + row, mask=written, other=0)
    to = out + (pair.to(gl.int64) * num_outputs)[:, None] + (column * 256 + lane)[None, :]
    kind: gl.constexpr = out.dtype.element_ty
    found = gl.convert_layout((first * weight).to(kind), WRITTEN)
    gl.store(to, found, mask=written[:, None])
    found = gl.convert_layout((second * weight).to(kind), WRITTEN)
    gl.store(to + 128, found, mask=written[:, None])


@gluon.jit
def _compute(
    given: gl.tuple,
    scales: gl.tuple,
    sizes: gl.tuple,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
    GATE: gl.constexpr,
) -> None:
    """Multiplies and writes rows 64 * HALF and on of all of this program's units."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    # Threads have 16 bytes, which lie beside their neighbours': whole lines of a row at once.
    VECTOR: gl.constexpr = 16 if GATED else 8
    WRITTEN: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [VECTOR // 4, 128 // VECTOR], [4, 1], [1, 0]
    )
    tiles, row_memory, weight_memory, full, empty = given[2:7]
    shares, weight_scales = scales
    steps, columns = sizes[0], sizes[1]
    memory = (row_memory, weight_memory, full, empty)
    lane = gl.arange(0, 64, gl.SliceLayout(1, SUMS)) + 64 * HALF
    num_units = gl.load(tiles) * columns
    count = gl.program_id(0) * 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        _, column, expert, start, height = _unit(tiles, unit, columns)
        if height > 64 * HALF:
            place, real = start + lane, lane < height
            # A block's worth of outputs, of which there are twice as many in any case.
            block = (expert * columns + column) * 2
            apart = 1
            if GATED:
                block = expert * 2 * columns + column
                apart = columns
            size = steps if BLOCKS else 128
            of_first = weight_scales + block * size
            of_second = of_first + apart * size
            first, second, count = _multiplied(
                memory, count, steps, (shares + place, sizes[3], real), (of_first, of_second),
                HALF, STAGES, BLOCKS, SUMS,
            )  # fmt: skip
            if not BLOCKS:
                col = gl.arange(0, 128, gl.SliceLayout(0, SUMS))
                first *= gl.load(of_first + col)[None, :]
                second *= gl.load(of_second + col)[None, :]
            if GATED:
                _write_hidden(
                    first, second, place, real, start, height, column, given, sizes, HALF, GATE,
                    WRITTEN,
                )  # fmt: skip
            else:
                _write_parts(
                    first, second, place, real, start, height, column, given, sizes, HALF, WRITTEN
                )
        else:
            for _ in range(steps):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), count // STAGES & 1)
                mbarrier.arrive(empty.index(slot), count=1)
                count += 1


@gluon.jit
def _compute_first(
    given: gl.tuple, scales: gl.tuple, sizes: gl.tuple,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, GATED: gl.constexpr, GATE: gl.constexpr,
) -> None:  # fmt: skip
    """Does what `_compute` does for the first 64 rows of tiles."""
    _compute(given, scales, sizes, 0, STAGES, BLOCKS, GATED, GATE)


@gluon.jit
def _compute_last(
    given: gl.tuple, scales: gl.tuple, sizes: gl.tuple,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, GATED: gl.constexpr, GATE: gl.constexpr,
) -> None:  # fmt: skip
    """Does what `_compute` does for the other rows."""
    _compute(given, scales, sizes, 1, STAGES, BLOCKS, GATED, GATE)


@gluon.jit(do_not_specialize=["steps", "columns", "shares_stride", "out_scales_stride"])
def fp8_experts_ahead_kernel(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    shares: gl.tensor,
    weight_scales: gl.tensor,
    tiles: gl.tensor,
    order: gl.tensor,
    pair_weights: gl.tensor,
    out: gl.tensor,
    out_scales: gl.tensor,
    steps: gl.tensor,
    columns: gl.tensor,
    num_outputs: gl.tensor,
    shares_stride: gl.tensor,
    out_scales_stride: gl.tensor,
    limit: gl.tensor,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPIER_REGISTERS: gl.constexpr,
    BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
    GATE: gl.constexpr,
) -> None:
    """Computes units p, p + programs and so on in program p; unit u is the tile u // columns of
    rows, and u % columns of outputs.

    GATED: x [sorted pairs, H], weight [E * 2 * num_outputs, H], out e4m3 [sorted pairs,
    num_outputs]. Else x [sorted pairs, I], weight [E * num_outputs, I], out [pairs, num_outputs],
    times the pair's weight. `shares` and `out_scales` are those of rows, a group of 128 each.
    BLOCKS: weight_scales have one for each block of 128 x 128, else for each output.
    """
    row_memory = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 64, 128], x.layout)
    weight_memory = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 128, 128], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    # The copy engine sees barriers by a way of its own.
    fence_async_shared()
    given = (
        x, weight, tiles, row_memory, weight_memory, full, empty, order, pair_weights, out,
        out_scales,
    )  # fmt: skip
    scales = (shares, weight_scales)
    sizes = (steps, columns, num_outputs, shares_stride, out_scales_stride, limit)
    gl.warp_specialize(
        [
            (_compute_first, (given, scales, sizes, STAGES, BLOCKS, GATED, GATE)),
            (_compute_last, (given, scales, sizes, STAGES, BLOCKS, GATED, GATE)),
            (_copy, (given, sizes, STAGES, GATED)),
        ],
        [4, 1],
        [REGISTERS, COPIER_REGISTERS],
    )


def fp8_experts_ahead(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    pair_weights: Tensor,
    rows: SortedTiles,
    out: tuple[Tensor, Tensor | None],
    gate: GateForm | None = None,
) -> None:
    """Computes one of the two GEMMs where `multiplies_ahead`.

    Args:
        x: [T * k, inner] e4m3, sorted, and scales [inner / 128, T * k].
        weight: [E, 2, I, H] or [E, 1, H, I] e4m3, and scales of blocks or of outputs.
        pair_weights: [T, k].
        out: [T * k, I] e4m3, sorted, and scales [I / 128, T * k]; or [T * k, H] by pair, and None.
        gate: None: SiLU.
    """
    given, shares = x
    numbers, scales = weight
    result, result_scales = out
    num_outputs, inner = numbers.shape[2:]
    gated = numbers.shape[1] == 2
    limit, _ = gate_arguments(gate)
    fp8_experts_ahead_kernel[(num_programs(given.device, 1),)](
        TensorDescriptor.from_tensor(given, [64, 128], TILE),
        TensorDescriptor.from_tensor(numbers.view(-1, inner), [128, 128], TILE),
        shares,
        scales,
        rows.tiles,
        rows.rows.order,
        pair_weights,
        result,
        result_scales,
        inner // 128,
        num_outputs // (COLS // 2 if gated else COLS),
        num_outputs,
        shares.stride(0),
        0 if result_scales is None else result_scales.stride(0),
        limit,
        STAGES=_STAGES,
        REGISTERS=_MULTIPLIER_REGISTERS,
        COPIER_REGISTERS=_COPIER_REGISTERS,
        BLOCKS=scales.dim() == 4,
        GATED=gated,
        GATE=gate_code(gate),
        num_warps=4,
    )
