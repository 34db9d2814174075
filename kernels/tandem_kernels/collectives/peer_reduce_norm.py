"""All-reduce, addition to the residual stream and RMSNorm in one launch.

    one-shot  1. write the own rows into all other ranks' memory (`peer_memory`)
              2. tell every rank, wait for every rank
              3. of each row: add in order of ranks, add to the residual stream, normalise
    two-shot  1. write each row into the memory of the rank that owns it
              2. tell, wait
              3. add the own rows in order of ranks, write the sums into all other ranks' memory
              4. tell, wait
              5. of each row: add the sum to the residual stream, normalise

Rows of a program are owned by all ranks in turn. Where others' inputs of a row would lie, a rank
that does not own it has room for its sum.

One launch saves another, and the sum's way through memory and back. Rounded where the kernels
behind each other round: the sum to the model's dtype, then the residual stream. So its bits are
those of `peer_reduce` and `fused_add_rms_norm`, and the same on every rank.

A launch for few rows is in place early (PDL), and reads nothing but the norm's weight before the
kernels in front have ended. The next one begins no earlier than that, so that calls of a rank still
follow each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
from tandem_kernels.small_launches import in_turn

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
    TWO_SHOT: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SEQUENCE: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds `x` [T, width] of all ranks to `residual`, and normalises the sums: row i in program
    i modulo their number."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, SIZE)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    own, call, half = begin_call(addresses, RANK, SEQUENCE)
    kind: tl.constexpr = x.dtype.element_ty
    inputs = HEADER + 2 * half * most * (kind.primitive_bitwidth // 8)
    part = num_rows * width
    for row in range(block, num_rows, blocks):
        place = row * width + column
        if TWO_SHOT:
            owner = (row + row // blocks) % RANKS
            if owner != RANK:
                given = tl.load(x + place, mask=inside)
                theirs = numbers_at(tl.load(addresses + owner) + inputs, kind)
                tl.store(theirs + RANK * part + place, given, mask=inside)
        else:
            given = tl.load(x + place, mask=inside)
            write_to_others(addresses, inputs, RANK * part + place, given, inside, RANK, RANKS)
    tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    if TWO_SHOT:
        for row in range(block, num_rows, blocks):
            if (row + row // blocks) % RANKS == RANK:
                place = row * width + column
                total = sum_of_ranks(x + place, mine + place, part, inside, RANK, RANKS, SIZE)
                total = total.to(kind)
                place += RANK * part
                tl.store(mine + place, total, mask=inside)
                write_to_others(addresses, inputs, place, total, inside, RANK, RANKS)
        tell_and_wait(addresses, 2 * call + 2, block, half, RANK, RANKS, BLOCKS, SLOTS)
    for row in range(block, num_rows, blocks):
        place = row * width + column
        if TWO_SHOT:
            owner = (row + row // blocks) % RANKS
            found = mine + owner * part + place
            total = tl.load(found, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        else:
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
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    memory: RankMemories,
    *,
    two_shot: bool,
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
    turns = triton.cdiv(num_rows, FLAG_BLOCKS)
    peer_reduce_norm_kernel[(triton.cdiv(num_rows, turns),)](
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
        TWO_SHOT=two_shot,
        SIZE=size,
        num_warps=min(max(size // 512, 1), 16),
        **in_turn(x.device, num_rows),
    )
    return out
