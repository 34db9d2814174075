"""Sampling: the hash's bits, the distribution, the filters, and independence of the batch."""

from __future__ import annotations

import math

import kernel_checks as check
import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem_kernels import ops
from tandem_kernels.reference.gumbel import gumbel_noise, hash_bits


def draw(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | int = 0,
    positions: Tensor | int = 0,
) -> Tensor:
    rows = logits.shape[0]
    floats = [torch.full((rows,), x) for x in (temperature, top_p, min_p)]
    seeds = seeds if isinstance(seeds, Tensor) else torch.full((rows,), seeds)
    positions = positions if isinstance(positions, Tensor) else torch.full((rows,), positions)
    k = torch.full((rows,), top_k, dtype=torch.int32)
    return ops.sample(logits, floats[0], k, floats[1], floats[2], seeds, positions)


KEYS = [(0, 0), (1, 0), (0, 1), (-1, 5), (2**63 - 1, 2**40 + 3), (-(2**63), 131071)]


@pytest.mark.parametrize(("seed", "position"), KEYS)
def test_hash_is_murmur3_of_seed_position_and_token(seed: int, position: int) -> None:
    bits = hash_bits(torch.tensor([seed]), torch.tensor([position]), 200)[0]
    expected = [oracle.hash_of(seed, position, t) for t in range(200)]
    assert bits.tolist() == expected


def test_noise_is_gumbel_noise_of_those_bits() -> None:
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([9]), 500)[0]
    expected = [oracle.gumbel(3, 9, t) for t in range(500)]
    torch.testing.assert_close(
        noise.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-6
    )


def test_noise_is_finite_for_the_extreme_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.array([[0, 2**32 - 1, 2**31 - 1, 2**31]], dtype=np.uint32)
    monkeypatch.setattr("tandem_kernels.reference.gumbel.hash_bits", lambda *_: bits)
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 4)[0]
    assert noise.isfinite().all()
    assert noise[0] > 22 and noise[1] < -2.7


def _chi_square(tokens: Tensor, probabilities: list[float]) -> tuple[float, int]:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = torch.tensor(probabilities).double() * tokens.numel()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return float(statistic), int(possible.sum()) - 1


def _limit(degrees: int) -> float:
    """Returns a value far in the tail of chi-square: a correct sampler stays below it (p about
    1e-5).
    """
    return degrees + 4.5 * math.sqrt(2 * degrees) + 12


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (1.3, 0, 0.7, 0.0),
     (1.0, 0, 1.0, 0.1), (0.8, 12, 0.8, 0.02)],
)  # fmt: skip
def test_distribution(
    vary: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(5)
    logits = torch.randn(40) * 1.5
    draws = 20000
    keys, fixed = torch.arange(draws), torch.full((draws,), 11)
    tokens = draw(
        logits.expand(draws, -1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=keys if vary == "seed" else fixed,
        positions=fixed if vary == "seed" else keys,
    )
    expected = oracle.filtered_probabilities(logits.tolist(), temperature, top_k, top_p, min_p)
    statistic, degrees = _chi_square(tokens, expected)
    assert statistic < _limit(degrees)


def test_neighbouring_positions_are_independent() -> None:
    """Pairs (token at p, token at p + 1) are as uniform as single tokens."""
    draws = 20000
    tokens = draw(torch.zeros(draws, 8), positions=torch.arange(draws), seeds=42)
    pairs = tokens[:-1:2] * 8 + tokens[1::2]
    statistic, degrees = _chi_square(pairs, [1 / 64] * 64)
    assert statistic < _limit(degrees)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
)
def test_token_is_the_oracles(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, vocab_size) * 2
    token = draw(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seed,
        positions=seed % 97,
    )
    expected = oracle.sample(logits[0].tolist(), temperature, top_k, top_p, min_p, seed, seed % 97)
    assert token.tolist() == [expected]


def test_token_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    rows, vocab_size = 12, 300
    logits = torch.randn(rows, vocab_size)
    columns = [
        torch.rand(rows) * 1.5,
        torch.randint(0, 20, (rows,), dtype=torch.int32),
        0.5 + torch.rand(rows) / 2,
        torch.rand(rows) / 10,
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.randint(0, 4000, (rows,)),
    ]
    columns[0][::4] = 0
    together = ops.sample(logits, *columns)
    alone = [ops.sample(logits[r : r + 1], *(c[r : r + 1] for c in columns)) for r in range(rows)]
    assert together.tolist() == torch.cat(alone).tolist()
    backwards = ops.sample(logits.flip(0), *(c.flip(0) for c in columns))
    assert together.tolist() == backwards.flip(0).tolist()


def test_seed_and_position_change_the_token() -> None:
    flat = torch.zeros(200, 1000)
    assert len(set(draw(flat, seeds=torch.arange(200)).tolist())) > 150
    assert len(set(draw(flat, positions=torch.arange(200)).tolist())) > 150
    assert len(set(draw(flat, seeds=9, positions=3).tolist())) == 1


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert draw(logits, temperature=0.0, top_k=3, top_p=0.2).tolist() == [1]


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]).expand(400, -1)
    assert set(draw(logits, top_k=2, seeds=torch.arange(400)).tolist()) == {1, 2, 3}
    assert set(draw(logits, top_p=0.1, seeds=torch.arange(400)).tolist()) == {1, 2, 3}


def test_masked_and_broken_logits_stay_in_range() -> None:
    masked = torch.full((1, 50), -math.inf)
    masked[0, 33] = -5.0
    assert draw(masked, top_p=0.9, min_p=0.1).tolist() == [33]
    assert draw(masked, temperature=0.0).tolist() == [33]
    broken = torch.full((1, 50), math.nan)
    assert 0 <= int(draw(broken, top_k=3)) < 50
    broken[0, 7] = 1.0
    assert draw(broken, temperature=0.0).tolist() == [7]


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 411])
def test_mask_logits(vocab_size: int) -> None:
    torch.manual_seed(6)
    check.mask_logits(ops.mask_logits, 7, vocab_size)


@pytest.mark.parametrize("vocab_size", [70, 96])
def test_apply_penalties(vocab_size: int) -> None:
    torch.manual_seed(1)
    for num_drafts in (0, 3):
        check.apply_penalties(ops.apply_penalties, 6, vocab_size, num_drafts)


def test_count_tokens_and_add_sparse_add_up_repeats() -> None:
    check.sparse_additions(ops.add_sparse, ops.count_tokens)


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_topk_logprobs(k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(k)
    check.topk_logprobs(ops.topk_logprobs, (torch.randn(3, 100) * 4).to(dtype), k)


PARTS = ops.sample_part, ops.best_of_parts


def test_the_best_of_all_parts_is_what_whole_rows_draw() -> None:
    """Parts of 40, 40 and 20 tokens of rows that are greedy, cold and hot; a NaN is never best."""
    check.sample_parts(*PARTS, torch.randn(32, 100) * 3, [40, 40, 20])
    check.sample_parts(*PARTS, (torch.randn(32, 100) * 2).round(), [99, 1])
    check.sample_parts(*PARTS, torch.where(torch.rand(32, 100) < 0.5, torch.nan, 1.0), [50, 50])
