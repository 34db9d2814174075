"""Linear layers of some rows by warps that multiply what they have loaded, in registers.

    16 outputs, 32 inputs: 16 bytes of two outputs a thread    times    8 columns, one of each row

Which inputs a product counts as its first and which as its last makes no difference, if weights and
rows agree. So a thread's part of an operand is what lies beside each other in memory, one vector of
an output, and nothing goes through shared memory but the sums of warps, which share the inner
dimension. First weights are asked for before the kernel in front has ended (PDL).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.gemm.few_row_warp_shapes import FewRowWarpTuning
from tandem_kernels.small_launches import in_turn


def _block_products() -> tuple[gl.constexpr, gl.constexpr]:
    """Returns instructions and registers: of four sums; then two vectors of an output each, that of
    a row, all as two words of 64 bits, and sums again."""
    names = [f"{kind}{i}" for kind in "pqb" for i in range(4)]
    sums = [f"s{i}" for i in range(4)]
    lines = [f"{{ .reg .b32 {', '.join(names)}; .reg .f32 {', '.join(sums)};"]
    for index, kind in enumerate("pqb"):
        for half in (0, 1):
            pair = f"{kind}{2 * half}, {kind}{2 * half + 1}"
            lines.append(f"mov.b64 {{{pair}}}, ${4 + 2 * index + half};")
    lines += [f"mov.f32 s{i}, ${10 + i};" for i in range(4)]
    for first in (0, 2):
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{{', '.join(sums)}}}, {{p{first}, q{first}, p{first + 1}, q{first + 1}}}, "
            f"{{b{first}, b{first + 1}}}, {{{', '.join(sums)}}};"
        )
    lines += [f"mov.f32 ${i}, s{i};" for i in range(4)]
    registers = ["=f"] * 4 + ["l"] * 6 + ["f"] * 4
    return gl.constexpr(" ".join([*lines, "}"])), gl.constexpr(",".join(registers))


BLOCK_PRODUCTS, _REGISTERS = _block_products()
_FOUR = gl.constexpr((gl.float32,) * 4)
_ROWS_AHEAD = gl.constexpr(2)
"""Vectors of a row that a thread has asked for; they are near, where weights are not."""


@gluon.jit
def _vector(
    at: gl.tensor, block: gl.tensor, real: gl.tensor, BLOCKS: gl.constexpr, INSIDE: gl.constexpr
) -> gl.tuple:
    """Loads eight numbers of a thread's line as two words. `at`: [WARPS, 32, 2] of int64."""
    places = at + block * 8
    if INSIDE:
        found = gl.load(places, mask=real, other=0)
    else:
        found = gl.load(places, mask=real & (block < BLOCKS), other=0)
    return gl.split(found)


@gluon.jit
def _places(WARPS: gl.constexpr) -> gl.tuple:
    """Returns of each word that a thread loads [WARPS, 32, 2] the first block, and which of eight
    outputs or rows, and which word of a block it is."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LINES)))[:, None, None]
    thread = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, LINES)))[None, :, None]
    word = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LINES)))[None, None, :]
    block = warp + thread * 0 + word * 0
    return block, thread // 4 + block * 0, thread % 4 * 2 + word


@gluon.jit
def _weights(
    low: gl.tensor,
    high: gl.tensor,
    block: gl.tensor,
    BLOCKS: gl.constexpr,
    INSIDE: gl.constexpr,
) -> gl.tuple:
    """Loads a thread's vectors of both outputs."""
    yes = block >= 0
    a, b = _vector(low, block, yes, BLOCKS, INSIDE)
    c, d = _vector(high, block, yes, BLOCKS, INSIDE)
    return a, b, c, d


@gluon.jit
def _asked(
    low: gl.tensor,
    high: gl.tensor,
    block: gl.tensor,
    WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tuple:
    """Loads the first AHEAD vectors of both outputs."""
    known: gl.tuple = ()
    for i in gl.static_range(AHEAD):
        at = block + i * WARPS
        known += (_weights(low, high, at, BLOCKS, (i + 1) * WARPS <= BLOCKS),)
    return known


@gluon.jit
def _sums_of_warps(
    known: gl.tuple,
    low: gl.tensor,
    high: gl.tensor,
    given: gl.tensor,
    real: gl.tensor,
    block: gl.tensor,
    WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """Returns the products of rows at `given`, which are `real`, with outputs at `low` and `high`:
    [8 outputs, 4 pairs of rows, 2, low and high]. `known`: as `_asked` gives them."""
    STEPS: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    inputs: gl.tuple = ()
    for i in gl.static_range(_ROWS_AHEAD):
        at = block + i * WARPS
        inputs += (_vector(given, at, real, BLOCKS, (i + 1) * WARPS <= BLOCKS),)
    zero = (gl.sum(block, axis=2) * 0).to(gl.float32)
    s0, s1, s2, s3 = zero, zero, zero, zero
    for i in gl.static_range(STEPS):
        a, b, c, d = known[0]
        e, f = inputs[0]
        known = known[1:]
        inputs = inputs[1:]
        if i + _ROWS_AHEAD < STEPS:
            at = block + (i + _ROWS_AHEAD) * WARPS
            inputs += (_vector(given, at, real, BLOCKS, (i + _ROWS_AHEAD + 1) * WARPS <= BLOCKS),)
        if i + AHEAD < STEPS:
            at = block + (i + AHEAD) * WARPS
            known += (_weights(low, high, at, BLOCKS, (i + AHEAD + 1) * WARPS <= BLOCKS),)
        s0, s1, s2, s3 = gl.inline_asm_elementwise(
            BLOCK_PRODUCTS, _REGISTERS, [a, b, c, d, e, f, s0, s1, s2, s3], _FOUR, True, 1
        )
    # Of a thread: two rows beside each other, of both outputs.
    both = gl.join(gl.join(s0, s1), gl.join(s2, s3)).reshape(WARPS, 8, 4, 2, 2)
    return gl.sum(both, axis=0)


@gluon.jit(do_not_specialize=["num_rows"])
def few_row_warp_kernel(
    x: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    out: gl.tensor,
    num_rows: gl.tensor,
    x_stride: gl.tensor,
    out_stride: gl.tensor,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    INNER: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ADDS: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Computes, in program j, outputs 16 * j and on of all rows. ADDS: to what `out` has."""
    BLOCKS: gl.constexpr = INNER // 32
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    if OVERLAP:
        gdc_launch_dependents()
    block, group, word = _places(WARPS)
    col = gl.program_id(0) * 16
    lines = weight.to(gl.pointer_type(gl.int64), bitcast=True)
    low = lines + (col + group).to(gl.int64) * (INNER // 4) + word
    high = low + 8 * (INNER // 4)
    known = _asked(low, high, block, WARPS, BLOCKS, AHEAD)
    lane = col + gl.arange(0, 16, gl.SliceLayout(0, OUT))
    row = gl.arange(0, 8, gl.SliceLayout(1, OUT))
    to = out + row[:, None] * out_stride + lane[None, :]
    written = (row < num_rows)[:, None] & (lane >= 0)[None, :]
    added = (row[:, None] * 0 + lane[None, :] * 0).to(gl.float32)
    if HAS_BIAS:
        added += gl.load(bias + lane).to(gl.float32)[None, :]
    if OVERLAP:
        gdc_wait()
    if ADDS:
        added += gl.load(to, mask=written, other=0.0).to(gl.float32)
    given = x.to(gl.pointer_type(gl.int64), bitcast=True) + group * (x_stride // 4) + word
    total = _sums_of_warps(known, low, high, given, group < num_rows, block, WARPS, BLOCKS, AHEAD)
    total = gl.convert_layout(total.permute(1, 2, 3, 0).reshape(8, 16), OUT) + added
    gl.store(to, total.to(out.dtype.element_ty), mask=written)


@gluon.jit(do_not_specialize=["num_rows"])
def few_row_warp_qkv_kernel(
    x: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    positions: gl.tensor,
    cos_sin_cache: gl.tensor,
    kv_cache: gl.tensor,
    slot_mapping: gl.tensor,
    out: gl.tensor,
    num_rows: gl.tensor,
    x_stride: gl.tensor,
    out_stride: gl.tensor,
    block_stride: gl.tensor,
    value_stride: gl.tensor,
    NUM_Q_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    INNER: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Computes, in program j, of all rows eight pairs of outputs: pairs 8 * j and on, counted as
    `few_row_qkv_kernel` counts them."""
    BLOCKS: gl.constexpr = INNER // 32
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    if OVERLAP:
        gdc_launch_dependents()
    block, group, word = _places(WARPS)
    head = gl.program_id(0) // (HALF // 8)
    start = gl.program_id(0) % (HALF // 8) * 8
    col = head * (2 * HALF) + start
    lines = weight.to(gl.pointer_type(gl.int64), bitcast=True)
    low = lines + (col + group).to(gl.int64) * (INNER // 4) + word
    high = low + HALF * (INNER // 4)
    known = _asked(low, high, block, WARPS, BLOCKS, AHEAD)
    lane = gl.arange(0, 8, gl.SliceLayout(0, OUT))
    row = gl.arange(0, 8, gl.SliceLayout(1, OUT))
    is_real = row < num_rows
    slot = gl.load(slot_mapping + row, mask=is_real & (head >= NUM_Q_HEADS), other=-1)
    rotates = is_real & (head < NUM_Q_HEADS + NUM_KV_HEADS)
    position = gl.load(positions + row, mask=rotates, other=0)
    angle = cos_sin_cache + position[:, None] * (2 * HALF) + (start + lane)[None, :]
    turned = rotates[:, None] & (lane >= 0)[None, :]
    cos = gl.load(angle, mask=turned, other=1.0).to(gl.float32)
    sin = gl.load(angle + HALF, mask=turned, other=0.0).to(gl.float32)
    added = (lane * 0).to(gl.float32)
    more = added
    if HAS_BIAS:
        added = gl.load(bias + col + lane).to(gl.float32)
        more = gl.load(bias + col + HALF + lane).to(gl.float32)
    if OVERLAP:
        gdc_wait()
    given = x.to(gl.pointer_type(gl.int64), bitcast=True) + group * (x_stride // 4) + word
    both = _sums_of_warps(known, low, high, given, group < num_rows, block, WARPS, BLOCKS, AHEAD)
    first, second = gl.split(both.permute(1, 2, 0, 3).reshape(8, 8, 2))
    first = gl.convert_layout(first, OUT) + added[None, :]
    second = gl.convert_layout(second, OUT) + more[None, :]
    one = (first * cos - second * sin).to(out.dtype.element_ty)
    two = (second * cos + first * sin).to(out.dtype.element_ty)
    written = is_real[:, None] & (lane >= 0)[None, :]
    to = out + row[:, None] * out_stride + (col + lane)[None, :]
    gl.store(to, one, mask=written)
    gl.store(to + HALF, two, mask=written)
    if head >= NUM_Q_HEADS:
        kv_head = head - NUM_Q_HEADS
        page = kv_cache + slot // BLOCK_SIZE * block_stride
        if kv_head >= NUM_KV_HEADS:
            kv_head -= NUM_KV_HEADS
            page += value_stride
        line = page + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * (2 * HALF)
        written = (slot >= 0)[:, None] & (lane >= 0)[None, :]
        to = line[:, None] + (start + lane)[None, :]
        gl.store(to, one, mask=written)
        gl.store(to + HALF, two, mask=written)


def run_few_rows_by_warps(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: FewRowWarpTuning,
    *,
    adds: bool = False,
) -> None:
    """Computes one GEMM into `out` [T, N], or adds it to what is there."""
    few_row_warp_kernel[(out.shape[1] // 16,)](
        x,
        weight,
        bias,
        out,
        len(x),
        x.stride(0),
        out.stride(0),
        INNER=weight.shape[1],
        HAS_BIAS=bias is not None,
        ADDS=adds,
        **_launch(x, tuning),
    )


def run_few_row_qkv_by_warps(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
    tuning: FewRowWarpTuning,
) -> None:
    """Computes heads into `out` [T, Hq + 2 Hkv, D], and writes the cache."""
    _, num_heads, head_dim = out.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    few_row_warp_qkv_kernel[(len(weight) // 16,)](
        x,
        weight,
        bias,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        out,
        len(x),
        x.stride(0),
        out.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        NUM_Q_HEADS=num_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        INNER=weight.shape[1],
        HAS_BIAS=bias is not None,
        **_launch(x, tuning),
    )


def _launch(x: Tensor, tuning: FewRowWarpTuning) -> dict[str, int | bool]:
    return {
        "WARPS": tuning.warps,
        "AHEAD": tuning.ahead,
        "num_warps": tuning.warps,
        "maxnreg": tuning.registers,
        **in_turn(x.device, len(x)),
    }
