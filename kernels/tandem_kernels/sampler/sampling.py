"""Gumbel-max sampling without a softmax and without a sort.

1. `filter_floor`: where a row has filters, the smallest logit that they keep.
2. `block_argmax_kernel`: noise, and the best token of each stretch of the vocabulary. The maximum
   of x / T - log E, E exponential, is the minimum of E * exp((peak - x) / T): one logarithm less
   a token, and the other only where a large E could win, for E >= u.
3. `row_argmax_kernel`: the best of those.

A row is reduced by programs of its own. How they are cut depends on the number of rows, unless a
fixed order is asked for: then not even equal logits are told apart by the rest of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.sampler.filter_floor import filter_floor
from tandem_kernels.sampler.gumbel import row_key, small_exponential, uniform


@triton.jit(do_not_specialize=["num_blocks"])
def block_argmax_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    floors: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    best_values: tl.tensor,
    best_ids: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_FLOORS: tl.constexpr,
) -> None:
    """Finds, in program (s, j), the best noisy logit among tokens j * BLOCK and on of row s."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    t = tl.load(temperature + row)
    if t > 0.0:
        inverse_t = tl.div_rn(1.0, t)
        if HAS_FLOORS:
            x = tl.where(x >= tl.load(floors + row), x, float("-inf"))
        peak = tl.maximum(tl.max(x, axis=0), -3.0e38)
        handicap = tl.exp2((peak - x) * (inverse_t * 1.4426950408889634))
        u = uniform(row_key(tl.load(seeds + row), tl.load(positions + row)), token)
        small = u < 0.0625
        score = tl.where(small, small_exponential(u), u) * handicap
        best = tl.min(tl.where(small, score, float("inf")), axis=0)
        if tl.min(tl.where(small, float("inf"), score), axis=0) <= best:
            score = tl.where(small, score, -tl.log(1.0 - u) * handicap)
        lowest, place = tl.min(score, axis=0, return_indices=True)
        value = tl.where(lowest < float("inf"), peak * inverse_t - tl.log(lowest), float("-inf"))
    else:
        value, place = tl.max(x, axis=0, return_indices=True)
    tl.store(best_values + row * num_blocks + block, value)
    tl.store(best_ids + row * num_blocks + block, block * BLOCK + place)


@triton.jit(do_not_specialize=["num_blocks"])
def row_argmax_kernel(
    best_values: tl.tensor,
    best_ids: tl.tensor,
    sampled: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Reduces one row in each program; blocks are in order of token ids, so equals go to the lowest
    id.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCKS)
    inside = lane < num_blocks
    value = tl.load(best_values + row * num_blocks + lane, mask=inside, other=float("-inf"))
    _, place = tl.max(value, axis=0, return_indices=True)
    tl.store(sampled + row, tl.load(best_ids + row * num_blocks + place).to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    has_filters: bool = True,
    fixed_order: bool = False,
) -> Tensor:
    """See `reference.sampling.sample`."""
    num_rows, vocab_size = logits.shape
    sampled = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return sampled
    floors = filter_floor(logits, temperature, top_k, top_p, min_p) if has_filters else None
    block = min(1024 if num_rows <= 16 or fixed_order else 4096, triton.next_power_of_2(vocab_size))
    num_blocks = triton.cdiv(vocab_size, block)
    best_values = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    block_argmax_kernel[(num_rows, num_blocks)](
        logits,
        temperature,
        floors,
        seeds,
        positions,
        best_values,
        best_ids,
        logits.stride(0),
        vocab_size,
        num_blocks,
        BLOCK=block,
        HAS_FLOORS=has_filters,
        num_warps=4 if block <= 1024 else 8,
    )
    row_argmax_kernel[(num_rows,)](
        best_values,
        best_ids,
        sampled,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return sampled
