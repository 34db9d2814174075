"""Chunks behind a longer context are shorter, and take as long as the first."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.contracts.steps.step_work import AttentionCost, ModelCost
from engine.sched.prompts.even_chunks import EvenChunks

BUDGET = 8192
FLOPS, PAIR = 1.4e10, 4 * 32 * 4096.0
"""Those of an 8B model, of a token and of a pair of tokens."""


def cost_of(window: int | None = None) -> ModelCost:
    seen = AttentionCost(window=window, flops_of_prompts=PAIR, flops_of_decodes=PAIR, kv_bytes=0.0)
    return ModelCost(
        flops_per_token=FLOPS,
        flops_per_sample=0.0,
        weight_bytes=0.0,
        token_bytes=0.0,
        attention=(seen,),
    )


def time_of(cost: ModelCost, context: int, count: int) -> float:
    """Adds up what each token costs by itself."""
    pairs = sum(context + i for i in range(count)) + count / 2
    return count * cost.flops_per_token + pairs * cost.attention[0].flops_of_prompts


def test_chunks_of_a_long_prompt_take_as_long_as_the_first() -> None:
    cost = cost_of()
    chunks = EvenChunks(cost, BUDGET)
    counts, context = [], 0
    while context < 128 << 10:
        counts.append(chunks.longest(context, BUDGET))
        context += counts[-1]
    assert counts[0] == BUDGET
    assert all(second <= first for first, second in pairwise(counts))
    assert counts[-1] < BUDGET / 3
    first, context = time_of(cost, 0, BUDGET), 0
    for count in counts:
        # Rounded down to whole tiles.
        assert time_of(cost, context, count) <= first < time_of(cost, context, count + 64)
        assert chunks.charge(context, count) <= BUDGET
        assert chunks.charge(context, count) > BUDGET - 64 * BUDGET / count
        context += count


@pytest.mark.parametrize("limit", [1, 5, 63, 64, 100, BUDGET])
@pytest.mark.parametrize("context", [0, 17, 1 << 20])
def test_a_chunk_has_a_token_and_stays_in_its_limit(context: int, limit: int) -> None:
    chunks = EvenChunks(cost_of(), BUDGET)
    count = chunks.longest(context, limit)
    assert 1 <= count <= limit
    assert count <= chunks.charge(context, count) <= BUDGET


def test_windows_cost_the_same_everywhere() -> None:
    chunks = EvenChunks(cost_of(window=1024), BUDGET)
    assert chunks.longest(1 << 20, BUDGET) == BUDGET
    assert chunks.charge(1 << 20, 100) == 100
