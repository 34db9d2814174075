"""Tests what a step's rows ask for: pairs and KV, by hand and against counting each pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.steps.step_work import ExpertCost, StepWork, num_pairs


def pairs_one_by_one(end: int, count: int, window: int | None) -> int:
    seen = [min(place + 1, window or place + 1) for place in range(end - count, end)]
    return sum(seen)


@given(st.integers(1, 60), st.data())
def test_pairs_of_a_chunk(end: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, end))
    window = data.draw(st.none() | st.integers(1, 70))
    assert num_pairs(end, count, window) == pairs_one_by_one(end, count, window)


@given(st.lists(st.integers(4, 90), min_size=1, max_size=6), st.integers(1, 4))
def test_pairs_and_kv_of_decodes(lengths: list[int], query_len: int) -> None:
    windows = (None, 7)
    work = StepWork(windows)
    work.add_decodes(lengths, query_len)
    assert work.num_tokens == work.num_sampled == len(lengths) * query_len
    for place, window in enumerate(windows):
        expected = sum(pairs_one_by_one(end, query_len, window) for end in lengths)
        assert work.pairs_of_decodes[place] == expected
        seen = sum(min(end, end if window is None else window + query_len - 1) for end in lengths)
        assert work.kv_tokens[place] == seen


def test_a_step_is_of_a_kind() -> None:
    work = StepWork((None,))
    work.add_chunk(12, 4, samples=False)
    assert (work.kind, work.num_sampled, work.kv_tokens) == ("prefill", 0, [12])
    work.add_decodes([5], 1)
    assert (work.kind, work.num_sampled, work.num_rows, work.num_tokens) == ("mixed", 1, 2, 5)


def test_few_tokens_read_few_experts() -> None:
    experts = ExpertCost(count=8, top_k=2, bytes_each=100.0)
    assert experts.bytes_read(1) == pytest.approx(200.0)
    assert experts.bytes_read(2) == pytest.approx(350.0)
    assert experts.bytes_read(1000) == pytest.approx(800.0)
    assert experts.bytes_read(0) == 0
