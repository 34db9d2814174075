"""Latents in e4m3 on their way into shared memory, in half precision.

Matrix units multiply no e4m3 by half precision. A thread has words of four numbers, a piece of a
tile at a time; once they are widened and written, the piece's registers wait for the next tile's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from tandem_kernels.attention.latent_line import own_run, stretch


@gluon.jit
def _blocks(
    table: gl.tensor, start: gl.tensor, end: gl.tensor, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Returns the blocks of a tile's rows: one where the tile lies within a block."""
    if BLOCK_SIZE % TILE == 0:
        block = gl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        position = start + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
        block = gl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
    return block


@gluon.jit
def _loaded(
    cache: gl.tuple, block: gl.tensor, start: gl.tensor, end: gl.tensor, first: gl.constexpr,
    width: gl.constexpr, ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Loads `width` words from `first` on of a tile's rows before `end`; of others, zeros.
    `cache`: its words, and how many there are from one block to the next."""
    words, block_stride = cache
    position = start + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    word = first + gl.arange(0, width, gl.SliceLayout(0, LAYOUT))
    rows = words + block.to(gl.int64) * block_stride + position % BLOCK_SIZE * ROW
    return gl.load(rows[:, None] + word[None, :], mask=(position < end)[:, None], other=0)


@gluon.jit
def _pieces(
    cache: gl.tuple, block: gl.tensor, start: gl.tensor, end: gl.tensor, WIDTH: gl.constexpr,
    ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Loads the latents of a tile's rows."""
    first = _loaded(cache, block, start, end, 0, WIDTH, ROW, BLOCK_SIZE, TILE, LAYOUT)
    second = _loaded(cache, block, start, end, WIDTH, WIDTH, ROW, BLOCK_SIZE, TILE, LAYOUT)
    third = _loaded(cache, block, start, end, 2 * WIDTH, WIDTH, ROW, BLOCK_SIZE, TILE, LAYOUT)
    fourth = _loaded(cache, block, start, end, 3 * WIDTH, WIDTH, ROW, BLOCK_SIZE, TILE, LAYOUT)
    return first, second, third, fourth


@gluon.jit
def _wide(words: gl.tensor) -> gl.tensor:
    """Returns words of two numbers in half precision of words of four in e4m3."""
    first, second = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(first, second).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def widen(
    given: gl.tuple, memory: gl.tuple, sizes: gl.tuple,
    ROW_TILES: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, REQS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Brings all tiles of this program's run, in half precision."""
    words, block_tables, seq_lens = given[:3]
    full, empty = memory[2:4]
    latents, keys = memory[7:]
    num_reqs, table_stride, block_stride = sizes[:3]
    cache = (words, block_stride)
    WIDTH: gl.constexpr = LATENT // 16
    NARROW: gl.constexpr = ROPE // 4
    KEYS: gl.constexpr = LATENT // 4
    ROW: gl.constexpr = KEYS + NARROW
    BY_16: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0])
    BY_8: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    if OVERLAP:
        gdc_wait()
    ends, here, end = own_run(seq_lens, num_reqs, ROW_TILES, TILE, REQS, 4)
    count = here * 0
    while here < end:
        r, seq_len, _, _, first, last = stretch(ends, here, end, seq_lens, TILE)
        table = block_tables + r.to(gl.int64) * table_stride
        stop = gl.minimum(last * TILE, seq_len)
        at = first * TILE
        block = _blocks(table, at, stop, BLOCK_SIZE, TILE, BY_16)
        of_key = _blocks(table, at, stop, BLOCK_SIZE, TILE, BY_8)
        found_0, found_1, found_2, found_3 = _pieces(
            cache, block, at, stop, WIDTH, ROW, BLOCK_SIZE, TILE, BY_16
        )
        key = _loaded(cache, of_key, at, stop, KEYS, NARROW, ROW, BLOCK_SIZE, TILE, BY_8)
        block = _blocks(table, at + TILE, stop, BLOCK_SIZE, TILE, BY_16)
        of_key = _blocks(table, at + TILE, stop, BLOCK_SIZE, TILE, BY_8)
        for tile in range(first, last):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), count // STAGES & 1 ^ 1)
            at = (tile + 1) * TILE
            own = latents.index(slot)
            own.slice(0, 2 * WIDTH, dim=1).store(_wide(found_0))
            found_0 = _loaded(cache, block, at, stop, 0, WIDTH, ROW, BLOCK_SIZE, TILE, BY_16)
            own.slice(2 * WIDTH, 2 * WIDTH, dim=1).store(_wide(found_1))
            found_1 = _loaded(cache, block, at, stop, WIDTH, WIDTH, ROW, BLOCK_SIZE, TILE, BY_16)
            own.slice(4 * WIDTH, 2 * WIDTH, dim=1).store(_wide(found_2))
            found_2 = _loaded(
                cache, block, at, stop, 2 * WIDTH, WIDTH, ROW, BLOCK_SIZE, TILE, BY_16
            )
            own.slice(6 * WIDTH, 2 * WIDTH, dim=1).store(_wide(found_3))
            found_3 = _loaded(
                cache, block, at, stop, 3 * WIDTH, WIDTH, ROW, BLOCK_SIZE, TILE, BY_16
            )
            keys.index(slot).store(_wide(key))
            key = _loaded(cache, of_key, at, stop, KEYS, NARROW, ROW, BLOCK_SIZE, TILE, BY_8)
            fence_async_shared()
            mbarrier.arrive(full.index(slot), count=1)
            block = _blocks(table, at + TILE, stop, BLOCK_SIZE, TILE, BY_16)
            of_key = _blocks(table, at + TILE, stop, BLOCK_SIZE, TILE, BY_8)
            count += 1
        here += last - first
