"""All-reduce, addition to the residual stream and RMSNorm in one launch.

    1. write the own rows into all other ranks' memory (`peer_memory`)
    2. tell every rank, wait for every rank
    3. of each row: add in order of ranks, add to the residual stream, normalise

It saves a launch, and the sum's way through memory and back. Rounded where the kernels behind each
other round: the sum to the model's dtype, then the residual stream. So its bits are those of
`peer_reduce` and `fused_add_rms_norm`, and the same on every rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.collectives.peer_memory import (
    FLAG_BLOCKS,
    VECTOR,
    RankMemories,
    begin_call,
    end_call,
    numbers_at,
    sum_of_ranks,
    tell_and_wait,
    write_to_others,
)
from tandem_kernels.elementwise.rms_norm import normed_row

MAX_HIDDEN = 16384


@triton.jit(do_not_specialize=["num_rows"])
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
    own, call, half = begin_call(addresses, RANK, SEQUENCE)
    kind: tl.constexpr = x.dtype.element_ty
    inputs = HEADER + 2 * half * most * (kind.primitive_bitwidth // 8)
    part = num_rows * width
    column = tl.arange(0, SIZE)
    inside = column < width
    for row in range(block, num_rows, blocks):
        place = row * width + column
        given = tl.load(x + place, mask=inside)
        write_to_others(addresses, inputs, RANK * part + place, given, inside, RANK, RANKS)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    for row in range(block, num_rows, blocks):
        place = row * width + column
        total = sum_of_ranks(x + place, mine + place, part, inside, RANK, RANKS, SIZE)
        carried = residual + row * residual_stride + column
        before = tl.load(carried, mask=inside, other=0.0).to(tl.float32)
        value = (total.to(kind).to(tl.float32) + before).to(kind)
        tl.store(carried, value, mask=inside)
        normed = normed_row(value, scale, width, eps)
        tl.store(out + place, normed.to(kind), mask=inside)
    end_call(own, call, blocks, SEQUENCE)


def reduces_norm(x: Tensor, residual: Tensor, memory: RankMemories) -> bool:
    """Returns whether the kernel takes rows `x` [T, H]: whole vectors, and room for a message from
    every rank."""
    num_rows, width = x.shape
    return (
        num_rows > 0
        and width % VECTOR == 0
        and width <= MAX_HIDDEN
        and residual.dtype == x.dtype
        and memory.fits_one_shot(x.numel(), x.element_size())
    )


def peer_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: RankMemories
) -> Tensor:
    """Returns the norm [T, H] of `residual`, which becomes the sum of itself and `x` over ranks.
    All ranks call this alike, in turn.

    Args:
        x: [T, H], contiguous; only what `reduces_norm` takes.
        residual: [T, H], the same on every rank; rows may lie apart.
        weight: [H].
    """
    num_rows, width = x.shape
    out = torch.empty_like(x)
    size = triton.next_power_of_2(width)
    peer_reduce_norm_kernel[(min(FLAG_BLOCKS, num_rows),)](
        x,
        residual,
        weight,
        out,
        memory.addresses,
        num_rows,
        width,
        residual.stride(0),
        memory.room(x.element_size()),
        eps,
        **memory.constants,
        SIZE=size,
        num_warps=min(max(size // 512, 1), 16),
    )
    return out
