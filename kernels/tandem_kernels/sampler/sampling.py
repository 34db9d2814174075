"""Gumbel-max sampling without a softmax and without a sort.

1. `filter_floor`: where a row has filters, the smallest logit that they keep.
2. `block_argmax_kernel`: noise, and the best token of each stretch of the vocabulary. The maximum
   of x / T - log E, E exponential, is the minimum of E * exp((peak - x) / T): one logarithm less
   a token, and the other only where a large E could win, for E >= u.
3. `row_argmax_kernel`: the best of those.
4. `best_of_parts`: the best of what ranks found, each in its part of the vocabulary.

A row is reduced by programs of its own. How they are cut depends on the number of rows, unless a
fixed order is asked for: then not even equal logits are distinguished by the rest of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.sampler.filter_floor import filter_floor
from tandem_kernels.sampler.gumbel import row_key, small_exponential, uniform
from tandem_kernels.small_launches import in_turn, take_turn


@triton.jit(do_not_specialize=["num_blocks", "first_token"])
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
    first_token: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_FLOORS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Finds, in program (s, j), the best noisy logit among tokens j * BLOCK and on of row s; token
    0 of `logits` is `first_token` of the vocabulary."""
    take_turn(OVERLAP)
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
        u = uniform(row_key(tl.load(seeds + row), tl.load(positions + row)), first_token + token)
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
    tl.store(best_ids + row * num_blocks + block, first_token + block * BLOCK + place)


@triton.jit(do_not_specialize=["num_blocks"])
def row_argmax_kernel(
    best_values: tl.tensor,
    best_ids: tl.tensor,
    sampled: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
    WITH_VALUES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Reduces one row in each program; blocks are in order of token ids, so equals go to the lowest
    id. WITH_VALUES: `sampled` [S, 2] gets the best value and its id, in float32.
    """
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCKS)
    inside = lane < num_blocks
    value = tl.load(best_values + row * num_blocks + lane, mask=inside, other=float("-inf"))
    best, place = tl.max(value, axis=0, return_indices=True)
    token = tl.load(best_ids + row * num_blocks + place)
    if WITH_VALUES:
        tl.store(sampled + 2 * row, best)
        tl.store(sampled + 2 * row + 1, token.to(tl.float32))
    else:
        tl.store(sampled + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def best_of_parts_kernel(
    parts: tl.tensor,
    chosen: tl.tensor,
    num_rows: tl.tensor,
    num_parts: tl.tensor,
    PARTS: tl.constexpr,
) -> None:
    """Reduces one row of `parts` [num_parts, num_rows, 2] in each program."""
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    pair = parts + 2 * (lane * num_rows + row)
    value = tl.load(pair, mask=lane < num_parts, other=float("-inf"))
    _, place = tl.max(value, axis=0, return_indices=True)
    tl.store(chosen + row, tl.load(parts + 2 * (place * num_rows + row) + 1).to(tl.int64))


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
    sampled = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits) == 0:
        return sampled
    floors = filter_floor(logits, temperature, top_k, top_p, min_p) if has_filters else None
    _find_best(logits, temperature, floors, seeds, positions, 0, fixed_order, sampled)
    return sampled


def sample_part(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token: int
) -> Tensor:
    """See `reference.sampling.sample_part`."""
    found = torch.empty((len(logits), 2), dtype=torch.float32, device=logits.device)
    if len(logits) > 0:
        _find_best(logits, temperature, None, seeds, positions, first_token, False, found)
    return found


def best_of_parts(parts: Tensor) -> Tensor:
    """See `reference.sampling.best_of_parts`."""
    num_parts, num_rows, _ = parts.shape
    chosen = torch.empty(num_rows, dtype=torch.int64, device=parts.device)
    if num_rows > 0:
        lanes = triton.next_power_of_2(num_parts)
        best_of_parts_kernel[(num_rows,)](
            parts, chosen, num_rows, num_parts, PARTS=lanes, num_warps=1
        )
    return chosen


def _find_best(
    logits: Tensor,
    temperature: Tensor,
    floors: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    first_token: int,
    fixed_order: bool,
    out: Tensor,
) -> None:
    """Writes each row's best token to `out` [S], or its value and token to `out` [S, 2]."""
    num_rows, vocab_size = logits.shape
    block = min(1024 if num_rows <= 16 or fixed_order else 4096, triton.next_power_of_2(vocab_size))
    num_blocks = triton.cdiv(vocab_size, block)
    best_values = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    turn = in_turn(logits.device, num_rows)
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
        first_token,
        BLOCK=block,
        HAS_FLOORS=floors is not None,
        num_warps=4 if block <= 1024 else 8,
        **turn,
    )
    row_argmax_kernel[(num_rows,)](
        best_values,
        best_ids,
        out,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        WITH_VALUES=out.dim() == 2,
        num_warps=1,
        **turn,
    )
