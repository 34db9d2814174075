"""Sorts (token, expert) pairs by expert, for steps with many pairs.

Pairs are numbered token * k + place. Each program reads all pairs and places those of its own
expert: the numbers are few, and one launch is less than the start of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 8192


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Places the pairs of expert e in program e, behind those of all lower experts."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    start = 0
    count = 0
    for first in range(0, num_pairs, CHUNK):
        of_pair = tl.load(experts + first + lane, mask=first + lane < num_pairs, other=-1)
        start += tl.sum(((of_pair >= 0) & (of_pair < expert)).to(tl.int32), axis=0)
        count += tl.sum((of_pair == expert).to(tl.int32), axis=0)
    tl.store(counts + expert, count)
    if count > 0:
        for first in range(0, num_pairs, CHUNK):
            pair = first + lane
            of_pair = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
            own = of_pair == expert
            rank = tl.cumsum(own.to(tl.int32), axis=0)
            tl.store(order + start + rank - 1, pair, mask=own)
            start += tl.max(rank, axis=0)


def sort_pairs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the pairs of `experts` [T, k] int32, -1 for none.

    Returns:
        (order [T * k] int32, counts [E] int32): the pairs by expert, and how many each has.
    """
    num_pairs = experts.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    chunk = min(CHUNK, max(16, triton.next_power_of_2(num_pairs)))
    sort_pairs_kernel[(num_experts,)](
        experts, order, counts, num_pairs, CHUNK=chunk, num_warps=max(1, min(16, chunk // 256))
    )
    return order, counts
