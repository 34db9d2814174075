"""The drafts that the bench of speculation plants, and the window in which it measures."""

from __future__ import annotations

import pytest
import torch

from bench.engine import speculative
from bench.engine.speculative import PlantedDrafter, Watch, lookup_tables
from engine.messages import EngineCoreOutput
from tandem_kernels import ops


def test_planted_drafts_are_what_an_answer_says_next_or_a_lie() -> None:
    answers = torch.tensor([[1, 10, 20, 30, 40, 50], [2, 11, 21, 31, 41, 51]])
    lies = torch.zeros_like(answers).bool()
    lies[1, 3] = True
    rows = lookup_tables(4, 16, 3, "cpu")
    rows.token_ids[3, 0], rows.token_ids[0, 0] = 1, 2
    rows.total_len[3], rows.total_len[0] = 4, 2
    drafts = PlantedDrafter(answers, lies).propose(torch.tensor([3, 0], dtype=torch.int32), rows)
    assert drafts.tolist() == [[40, 50, 50], [21, 31 ^ 1, 41]]


def test_speed_is_that_of_steps_in_which_all_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 2.0, 4.0])
    monkeypatch.setattr(speculative.time, "perf_counter", lambda: next(now))
    watch = Watch(2)
    for tokens in ({"a": [1]}, {"a": [2], "b": [3]}, {"a": [4, 5], "b": [6]}, {"b": [7, 8, 9]}):
        watch([EngineCoreOutput(name, new) for name, new in tokens.items()])
    watch([EngineCoreOutput("a", [1], "length"), EngineCoreOutput("b", [1])])
    assert watch.tokens["b"] == [3, 6, 7, 8, 9, 1]
    assert watch.tokens_per_s == (3 + 3) / (4.0 - 1.0)


def test_the_rows_that_are_looked_up_have_a_match() -> None:
    rows = lookup_tables(3, 64, 3, "cpu")
    found = ops.lookup_ngrams(torch.arange(3, dtype=torch.int32), rows, 2, 4)
    assert torch.equal(found, rows.token_ids[:, 36:39].long())
