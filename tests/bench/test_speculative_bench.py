"""The drafts that the bench of speculation plants, and the window in which it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.engine import speculative
from bench.engine.drafts.copying import CopyingExecutor
from bench.engine.drafts.engines import Engine, decoding_config, write_models
from bench.engine.drafts.requests import Answers
from bench.engine.parity import run
from bench.engine.speculative import PlantedDrafter, Watch, drafts_of, lookup_tables
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
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


def test_a_model_made_to_copy_repeats_its_prompt(tmp_path: Path) -> None:
    """Drafts by n-grams then are always right."""
    write_models(tmp_path)
    config = decoding_config(tmp_path, drafts_of(3, adaptive=False), 4)
    engine = Engine(config, CopyingExecutor(config))
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    request = EngineCoreRequest(request_id="copy", spec=RequestSpec([*range(40, 60), 40], sampling))
    found = Answers()
    run(engine, [request], found)
    assert found.tokens["copy"] == list(range(41, 57))
    # One token comes with the prompt; three drafts are right in each step but the last.
    assert engine.core.stats().drafts.num_accepted_tokens >= 3 + 3 + 3 + 2
    engine.close()
