"""All-reduce, addition to the residual stream and RMSNorm in one launch.

    1. write the own rows into all other ranks' memory (`peer_memory`)
    2. tell every rank, wait for every rank
    3. of each row: add in order of ranks, add to the residual stream, normalise

It saves a launch, and the sum's way through memory and back. Rounded where the kernels behind each
other round: the sum to the model's dtype, then the residual stream. So its bits are those of
`peer_push` and `fused_add_rms_norm`, and the same on every rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.collectives.peer_memory import (
    FLAG_BLOCKS,
    HEADER_BYTES,
    MAX_RANKS,
    SEQUENCE,
    VECTOR,
    end_call,
    numbers_at,
    room_of_half,
    tell_and_wait,
)
from tandem_kernels.collectives.peer_push import one_shot_fits

MAX_BLOCKS = 64
MAX_HIDDEN = 16384


@triton.jit
def peer_reduce_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    residual_stride: tl.tensor,
    most: tl.tensor,
    eps: tl.tensor,
    HEADER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SEQUENCE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Adds `x` [T, width] of all ranks to `residual`, and normalises the sums: row i in program
    i modulo their number."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32))
    call = tl.load(own + SEQUENCE, volatile=True)
    half = call % 2
    kind: tl.constexpr = x.dtype.element_ty
    inputs = HEADER + 2 * half * most * (kind.primitive_bitwidth // 8)
    part = num_rows * width
    column = tl.arange(0, SIZE)
    inside = column < width
    for row in range(block, num_rows, blocks):
        place = row * width + column
        given = tl.load(x + place, mask=inside)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                theirs = numbers_at(tl.load(addresses + peer) + inputs, kind)
                tl.store(theirs + RANK * part + place, given, mask=inside)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS, False)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    for row in range(block, num_rows, blocks):
        place = row * width + column
        total = tl.zeros([SIZE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            else:
                got = mine + peer * part + place
                found = tl.load(got, mask=inside, other=0.0, cache_modifier=".cg")
                total += found.to(tl.float32)
        carried = residual + row * residual_stride + column
        before = tl.load(carried, mask=inside, other=0.0).to(tl.float32)
        value = (total.to(kind).to(tl.float32) + before).to(kind)
        tl.store(carried, value, mask=inside)
        wide = value.to(tl.float32)
        mean_square = tl.sum(wide * wide, axis=0) / width
        normed = wide * (1.0 / tl.sqrt_rn(mean_square + eps)) * scale
        tl.store(out + place, normed.to(kind), mask=inside)
    end_call(own, call, blocks, SEQUENCE)


def reduces_norm(x: Tensor, residual: Tensor, ranks: int, max_bytes: int) -> bool:
    """Returns whether the kernel takes rows `x` [T, H]: whole vectors, and room for a message from
    every rank."""
    num_rows, width = x.shape
    return (
        num_rows > 0
        and width % VECTOR == 0
        and width <= MAX_HIDDEN
        and residual.dtype == x.dtype
        and one_shot_fits(x.numel(), x.element_size(), ranks, max_bytes)
    )


def peer_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    addresses: Tensor,
    rank: int,
    max_bytes: int,
) -> Tensor:
    """Returns the norm [T, H] of `residual`, which becomes the sum of itself and `x` over ranks.
    All ranks call this alike, in turn.

    Args:
        x: [T, H], contiguous; only what `reduces_norm` takes.
        residual: [T, H], the same on every rank; rows may lie apart.
        weight: [H].
        addresses: As `peer_reduce` takes them.
    """
    num_rows, width = x.shape
    out = torch.empty_like(x)
    size = triton.next_power_of_2(width)
    peer_reduce_norm_kernel[(min(MAX_BLOCKS, num_rows),)](
        x,
        residual,
        weight,
        out,
        addresses,
        num_rows,
        width,
        residual.stride(0),
        room_of_half(max_bytes, x.element_size()),
        eps,
        HEADER=HEADER_BYTES,
        RANK=rank,
        RANKS=len(addresses),
        BLOCKS=FLAG_BLOCKS,
        SLOTS=MAX_RANKS,
        SEQUENCE=SEQUENCE,
        SIZE=size,
        num_warps=min(max(size // 512, 1), 16),
    )
    return out
