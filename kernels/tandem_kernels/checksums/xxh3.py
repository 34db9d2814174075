"""XXH3 of 128 bits, of memory that lies on a GPU: what the library xxhash finds on the host.

The hash (Y. Collet, xxHash's specification) has eight sums of 64 bits, the lanes. A stripe is 64
bytes, a word for each lane, and a block 16 stripes; numbers are little-endian:

    1. of a block, lane by lane: the sum of low times high half of (word xor key), for each stripe,
       plus the words of the lane's neighbour. These are independent of one another: `block_sums`
    2. lanes take in one block after the other, and are scrambled behind each: `xxh3_chain`, some
       parts in a program, a step for each block
    3. the last block is not scrambled, and the last 64 bytes come once more with other keys;
       lanes are multiplied in pairs and mixed into 128 bits

A CPU has the library instead, which is the reference of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.checksums.xxh3_sizes import is_hashed_on_gpu

ROWS = 32
"""Blocks of a program of `block_sums`."""
PARTS = 4
"""Parts of a program of `xxh3_chain`: eight lanes of each are a warp."""
AHEAD = 16
"""Steps whose sums are loaded at once."""
_BLOCK_BYTES = 1024
_BATCH_BYTES = 2 << 30
"""Parts that are hashed by one launch; the sums of their blocks take a 16th of it."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The library's own, of which all keys are words."""
_FIRST_LANES = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
_AT_LAST_STRIPE, _AT_LOW, _AT_HIGH = 121, 11, 117
"""Bytes of the secret where other keys begin than those of its words."""
SCRAMBLE_KEYS, LAST_KEYS, LOW_KEYS, HIGH_KEYS, FIRST_LANES = (
    tl.constexpr(place) for place in (16, 24, 32, 40, 48)
)
"""Places in the table of `_table`; its first 24 words are the secret's."""
LANE_PRIME = tl.constexpr(0x9E3779B1)
LOW_PRIME, HIGH_PRIME = tl.constexpr(0x9E3779B185EBCA87), tl.constexpr(0xC2B2AE3D27D4EB4F)
MIX_PRIME, ALL_ONES = tl.constexpr(0x165667919E3779F9), tl.constexpr((1 << 64) - 1)


@triton.jit
def _words(place: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(place, mask, 0).to(tl.uint64, bitcast=True)


@triton.jit
def _taken_in(own: tl.tensor, neighbour: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Returns what words add to their lanes."""
    keyed = own ^ key
    return (keyed & 0xFFFFFFFF) * (keyed >> 32) + neighbour


@triton.jit
def block_sums_kernel(
    addresses: tl.tensor,
    sizes: tl.tensor,
    firsts: tl.tensor,
    table: tl.tensor,
    sums: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """Writes, in program (p, r), what blocks `r * ROWS` and on of part p add to the lanes, to rows
    `firsts[p]` and on of `sums` [all blocks, 8] int64. The last block lacks its last stripe."""
    part = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    size = tl.load(sizes + part)
    last = (size - 1) // 1024
    if first > last:
        return
    block = first + tl.arange(0, ROWS)
    lane = tl.arange(0, 8)[None, None, :]
    stripe = tl.arange(0, 16)[None, :, None]
    there = block[:, None, None] * 16 + stripe < (size - 1) // 64
    there = there & (lane >= 0)
    words = tl.load(addresses + part).to(tl.pointer_type(tl.int64))
    words += block[:, None, None].to(tl.int64) * 128 + stripe * 8
    key = tl.load(table + stripe + lane).to(tl.uint64, bitcast=True)
    added = _taken_in(_words(words + lane, there), _words(words + (lane ^ 1), there), key)
    added = tl.where(there, added.to(tl.int64, bitcast=True), 0)
    rows = tl.load(firsts + part) + block.to(tl.int64)
    out = sums + rows[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out, tl.sum(added, axis=1), mask=(block <= last)[:, None])


@triton.jit
def _mixed(lanes: tl.tensor, key: tl.tensor, start: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Returns 64 bits [PARTS] of eight lanes: each pair's product, its halves added without carry
    (xor), and all four summed."""
    left, right = tl.split((lanes ^ key).reshape(PARTS, 4, 2))
    folded = (left * right) ^ tl.umulhi(left, right)
    mixed = tl.sum(folded.to(tl.int64, bitcast=True), axis=1).to(tl.uint64, bitcast=True) + start
    mixed = (mixed ^ (mixed >> 37)) * MIX_PRIME
    return mixed ^ (mixed >> 32)


@triton.jit(do_not_specialize=["num_parts"])
def xxh3_chain_kernel(
    addresses: tl.tensor,
    sizes: tl.tensor,
    firsts: tl.tensor,
    table: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    num_parts: tl.tensor,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Writes the hashes of PARTS parts, `out` [P, 2] int64: high half, low half."""
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    is_there = part < num_parts
    size = tl.load(sizes + part, is_there, 1024)
    last = (size - 1) // 1024
    lane = tl.arange(0, 8)[None, :]
    there = is_there[:, None] & (lane >= 0)
    of_blocks = sums + tl.load(firsts + part, is_there, 0)[:, None] * 8 + lane
    key = _words(table + SCRAMBLE_KEYS + lane, lane >= 0)
    lanes = _words(table + FIRST_LANES + lane + part[:, None] * 0, lane >= 0)
    for first in range(0, tl.max(last, axis=0), AHEAD):
        for step in tl.static_range(AHEAD):
            goes_on = there & (first + step < last)[:, None]
            new = lanes + _words(of_blocks + (first + step) * 8, goes_on)
            new = (new ^ (new >> 47) ^ key) * LANE_PRIME
            lanes = tl.where(goes_on, new, lanes)
    lanes += _words(of_blocks + last[:, None] * 8, there)
    words = tl.load(addresses + part, is_there, 0).to(tl.pointer_type(tl.int64))
    stripe = (words + (size - 64) // 8)[:, None]
    own, neighbour = _words(stripe + lane, there), _words(stripe + (lane ^ 1), there)
    lanes += _taken_in(own, neighbour, _words(table + LAST_KEYS + lane, lane >= 0))
    length = size.to(tl.uint64, bitcast=True)
    low_key, high_key = (
        _words(table + LOW_KEYS + lane, lane >= 0),
        _words(table + HIGH_KEYS + lane, lane >= 0),
    )
    low = _mixed(lanes, low_key, length * LOW_PRIME, PARTS)
    high = _mixed(lanes, high_key, (length * HIGH_PRIME) ^ ALL_ONES, PARTS)
    tl.store(out + part * 2, high.to(tl.int64, bitcast=True), mask=is_there)
    tl.store(out + part * 2 + 1, low.to(tl.int64, bitcast=True), mask=is_there)


def xxh3_128(parts: Sequence[Tensor]) -> list[bytes]:
    """Returns what `xxhash.xxh3_128_digest` has for the bytes of each part, in their order.

    Args:
        parts: On one device, contiguous, each `is_hashed_on_gpu`.
    """
    digests = []
    for batch in _batches(parts):
        halves = _hashes(batch).cpu().numpy()
        digests += [of_part.tobytes() for of_part in halves.astype(">i8")]
    return digests


def _batches(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    size = 0
    for part in parts:
        assert is_hashed_on_gpu(part) and part.is_contiguous()
        if batch and size + part.nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.nbytes
    if batch:
        yield batch


def _hashes(parts: list[Tensor]) -> Tensor:
    """Returns [P, 2] int64: high and low half."""
    device = parts[0].device
    addresses = torch.tensor([part.data_ptr() for part in parts])
    sizes = torch.tensor([part.nbytes for part in parts])
    num_blocks = (sizes + _BLOCK_BYTES - 1) // _BLOCK_BYTES
    ends = num_blocks.cumsum(0)
    facts = torch.stack([addresses, sizes, ends - num_blocks]).to(device)
    sums = torch.empty(int(ends[-1]), 8, dtype=torch.int64, device=device)
    out = torch.empty(len(parts), 2, dtype=torch.int64, device=device)
    table = _table().to(device)
    grid = len(parts), triton.cdiv(int(num_blocks.max()), ROWS)
    block_sums_kernel[grid](*facts, table, sums, ROWS=ROWS)
    xxh3_chain_kernel[(triton.cdiv(len(parts), PARTS),)](
        *facts, table, sums, out, len(parts), PARTS=PARTS, AHEAD=AHEAD, num_warps=1
    )
    return out


@cache
def _table() -> Tensor:
    """Returns all keys and the lanes at the beginning, [56] int64."""
    keys = [_key(8 * word) for word in range(24)]
    for first in (_AT_LAST_STRIPE, _AT_LOW, _AT_HIGH):
        keys += [_key(first + 8 * lane) for lane in range(8)]
    return torch.tensor([*keys, *map(_signed, _FIRST_LANES)])


def _key(place: int) -> int:
    return int.from_bytes(_SECRET[place : place + 8], "little", signed=True)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
