"""Min-p, top-k and top-p as one number a row: the smallest logit that they keep.

Every filter keeps the largest logits, so together they are a threshold, found without a sort:

1. `range_kernel`: the smallest and the largest logit of each stretch of the vocabulary.
2. `weigh_kernel`: what each stretch weighs above eight pivots between the row's smallest
   candidate and its largest logit.
3. `filter_floor_kernel`, a program a row: the exact search between the two pivots around the
   answer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.sampler.threshold_search import eighth_of, one_round, search_between, weigh
from tandem_kernels.small_launches import in_turn, take_turn

SEARCH_BLOCK = 4096


@triton.jit
def _has_filters(t: tl.tensor, k: tl.tensor, p: tl.tensor, least_p: tl.tensor) -> tl.tensor:
    return (t > 0.0) & ((k > 0) | (p < 1.0) | (least_p > 0.0))


@triton.jit
def _bounds(
    ranges: tl.tensor, num_blocks: tl.tensor, t: tl.tensor, least_p: tl.tensor, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Returns a row's smallest logit that min-p keeps (or a number below it), and its largest."""
    block = tl.arange(0, BLOCKS)
    mask = block < num_blocks
    least = tl.min(tl.load(ranges + 2 * block, mask=mask, other=float("inf")), axis=0)
    peak = tl.max(tl.load(ranges + 2 * block + 1, mask=mask, other=float("-inf")), axis=0)
    bound = tl.where(least_p > 0.0, peak + tl.log(tl.maximum(least_p, 1e-30)) * t, float("-inf"))
    return tl.maximum(least, bound), peak


@triton.jit
def range_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    ranges: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Finds, in program (s, j), the smallest finite and largest logit of stretch j of row s."""
    take_turn(OVERLAP)
    s = tl.program_id(0).to(tl.int64)
    t, k = tl.load(temperature + s), tl.load(top_k + s)
    if _has_filters(t, k, tl.load(top_p + s), tl.load(min_p + s)):
        j = tl.program_id(1)
        row = logits + s * logits_stride
        x = one_round(row, j, vocab_size, tl.zeros([BLOCK], tl.int32), True, BLOCK)
        place = ranges + (s * tl.num_programs(1) + j) * 2
        tl.store(place, tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0))
        tl.store(place + 1, tl.max(tl.where(x == x, x, float("-inf")), axis=0))


@triton.jit
def weigh_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    ranges: tl.tensor,
    sums: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Weighs, in program (s, j), stretch j of row s above the pivots; counted for top-k, else
    weighed.
    """
    take_turn(OVERLAP)
    s = tl.program_id(0).to(tl.int64)
    t, k = tl.load(temperature + s), tl.load(top_k + s)
    p, least_p = tl.load(top_p + s), tl.load(min_p + s)
    if _has_filters(t, k, p, least_p) & ((k > 0) | (p < 1.0)):
        j = tl.program_id(1)
        num_blocks = tl.num_programs(1)
        lo, peak = _bounds(ranges + s * num_blocks * 2, num_blocks, t, least_p, BLOCKS)
        stretch = logits + s * logits_stride + j * BLOCK
        rest = vocab_size - j * BLOCK
        none = tl.zeros([BLOCK], tl.int32)
        inverse_t = tl.div_rn(1.0, t)
        if k > 0:
            own = weigh(stretch, 1, rest, none, lo, peak, peak, inverse_t, False, True, BLOCK)
        else:
            own = weigh(stretch, 1, rest, none, lo, peak, peak, inverse_t, True, True, BLOCK)
        tl.store(sums + (s * num_blocks + j) * 16 + tl.arange(0, 16), own)


@triton.jit(do_not_specialize=["num_blocks"])
def filter_floor_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    ranges: tl.tensor,
    sums: tl.tensor,
    floors: tl.tensor,
    copies: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Searches one row in each program; a row without filters costs one load of each parameter."""
    take_turn(OVERLAP)
    s = tl.program_id(0).to(tl.int64)
    t, k = tl.load(temperature + s), tl.load(top_k + s)
    p, least_p = tl.load(top_p + s), tl.load(min_p + s)
    if not _has_filters(t, k, p, least_p):
        tl.store(floors + s, float("-inf"))
        return
    start, peak = _bounds(ranges + s * num_blocks * 2, num_blocks, t, least_p, BLOCKS)
    row = logits + s * logits_stride
    copies += s * (2 * tl.cdiv(vocab_size, BLOCK) * BLOCK)
    inverse_t = tl.div_rn(1.0, t)
    if (k > 0) | (p < 1.0):
        block, eighth = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 16)
        place = (s * num_blocks + block) * 16 + eighth[None, :]
        above = tl.sum(tl.load(sums + place, mask=block < num_blocks, other=0.0), axis=0)
        all_kept = tl.sum(tl.where(eighth == 0, above, 0.0), axis=0)
        end = float("inf")
        if (k > 0) & (k < all_kept):
            wanted = k.to(tl.float32)
            start, end = eighth_of(above, 0.0, wanted, start, peak)
            if start < end:
                start = search_between(
                    row, vocab_size, start, end, wanted, 1.0, peak, inverse_t, copies, False, BLOCK
                )
            end = float("inf")
        if (p < 1.0) & (start < peak):
            target = tl.where(k > 0, 0.0, all_kept * p)
            if k <= 0:
                start, end = eighth_of(above, 0.0, target, start, peak)
            if start < end:
                start = search_between(
                    row, vocab_size, start, end, target, p, peak, inverse_t, copies, True, BLOCK
                )
    tl.store(floors + s, start)


def filter_floor(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns the smallest logit [S] that the filters of each row keep; -inf for a row without
    filters.

    Arguments are those of `reference.sampling.sample`.
    """
    num_rows, vocab_size = logits.shape
    block = min(SEARCH_BLOCK, triton.next_power_of_2(vocab_size))
    num_blocks = triton.cdiv(vocab_size, block)
    ranges = logits.new_empty((num_rows, num_blocks, 2))
    sums = logits.new_empty((num_rows, num_blocks, 16))
    copies = logits.new_empty((num_rows, 2 * num_blocks * block))
    floors = logits.new_empty(num_rows)
    given = (logits, temperature, top_k, top_p, min_p, ranges)
    shape = (logits.stride(0), vocab_size)
    blocks = triton.next_power_of_2(num_blocks)
    turn = in_turn(logits.device, num_rows)
    range_kernel[(num_rows, num_blocks)](*given, *shape, BLOCK=block, num_warps=8, **turn)
    weigh_kernel[(num_rows, num_blocks)](
        *given, sums, *shape, BLOCK=block, BLOCKS=blocks, num_warps=8, **turn
    )
    filter_floor_kernel[(num_rows,)](
        *given, sums, floors, copies, *shape, num_blocks, BLOCK=block, BLOCKS=blocks, num_warps=16,
        **turn,
    )  # fmt: skip
    return floors
