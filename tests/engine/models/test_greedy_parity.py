"""Tests that 64 greedy tokens through scheduler, worker and sampler equal transformers', and so do
the log probabilities of prompts: every family, one rank and two, prompts chunked and whole, several
requests at once, and behind a cached prefix. Two ranks and whole prompts go on for 24 tokens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models.engine_rank import (
    IN_FULL,
    MODES,
    MODES_OF_SIZE,
    NUM_TOP,
    greedy,
    modes_of,
    num_tokens,
)
from tests.engine.models.parity_cases import NUM_GREEDY, VOCAB, prompts
from tests.engine.models.reference_models import (
    FAMILIES,
    GreedyAnswers,
    expected_logits,
    reference_logits,
    shared_reference,
)

CLEAR_LEAD = 2e-4
"""Ours differ from the reference by less than 1e-5. One whose best two logits are closer than this
would prove nothing either way."""
runs = pytest.mark.parametrize(
    ("family", "tp_size", "mode"),
    [
        (family, size, mode)
        for family in FAMILIES
        for size in MODES_OF_SIZE
        for mode in modes_of(family, size)
    ],
)
pytestmark = pytest.mark.timeout(600)
"""The first test waits for all engines of all families."""


@cache
def chosen_behind(folder: Path, answers: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Returns the token that transformers would choose behind each prompt and each beginning of its
    answer. If that is the answer's next one throughout, it would have given the answer."""
    model = shared_reference(folder)
    chosen = []
    for prompt, answer in zip(prompts(), answers, strict=True):
        logits = reference_logits(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        best = logits.topk(2)
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > CLEAR_LEAD
        chosen.append(best.indices[:, 0].tolist())
    return chosen


@runs
def test_greedy_tokens_equal_transformers(
    family: str,
    mode: str,
    tp_size: int,
    checkpoints: Path,
    greedy_by_rank: dict[int, list[dict[str, Any]]],
) -> None:
    def answers_of(ours: dict[str, Any], mode: str) -> list[list[int]]:
        return [ours[f"{family}/{mode}/{i}"]["tokens"] for i in range(len(prompts()))]

    full_mode, full_size = IN_FULL
    longest = answers_of(greedy_by_rank[full_size][0], full_mode)
    expected = chosen_behind(checkpoints / family, tuple(map(tuple, longest)))
    count = num_tokens(mode, tp_size)
    for ours in greedy_by_rank[tp_size]:
        answers = answers_of(ours, mode)
        assert [len(answer) for answer in answers] == [count] * len(answers)
        # As far as both begin alike, `expected` is what transformers chooses behind these too.
        assert answers == [chosen[:count] for chosen in expected]
        assert answers == [answer[:count] for answer in longest]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_on_a_gpu_equal_transformers(
    family: str, mode: str, checkpoints: Path
) -> None:
    """Runs with CUDA graphs, and every kernel in float32."""
    found = greedy(checkpoints / family, mode, 0, 1, "", "cuda")
    answers = [list(found[str(i)].tokens) for i in range(len(prompts()))]
    assert [len(answer) for answer in answers] == [NUM_GREEDY] * len(answers)
    assert chosen_behind(checkpoints / family, tuple(map(tuple, answers))) == answers


def test_a_guess_changes_no_answer(checkpoints: Path) -> None:
    """Whether it is right, wrong from some place on, too short or too long."""
    model, prompt = shared_reference(checkpoints / "llama"), prompts()[2]
    answer = GreedyAnswers(model).tokens(prompt, 9)
    wrong = [(token + 1) % VOCAB for token in answer]
    for guess in (answer, answer[:4], wrong, [*answer[:5], *wrong[5:]], [*answer, *wrong]):
        assert GreedyAnswers(model).tokens(prompt, 9, guess) == answer


@runs
def test_prompt_logprobs_equal_transformers(
    family: str,
    mode: str,
    tp_size: int,
    checkpoints: Path,
    greedy_by_rank: dict[int, list[dict[str, Any]]],
) -> None:
    expected = [logits.log_softmax(-1) for logits in expected_logits(checkpoints / family)]
    for ours in greedy_by_rank[tp_size]:
        for index, (prompt, logprobs) in enumerate(zip(prompts(), expected, strict=True)):
            found = ours[f"{family}/{mode}/{index}"]["prompt_logprobs"]
            assert len(found) == len(prompt) - 1
            if not found:
                continue
            ids, values, ranks = zip(*found, strict=True)
            at, tokens = logprobs[:-1], torch.tensor(prompt[1:]).unsqueeze(1)
            named = torch.cat((tokens, at.topk(NUM_TOP).indices), dim=1)
            assert list(ids) == named.tolist()
            expected_values = at.gather(1, named)
            torch.testing.assert_close(torch.tensor(values), expected_values, rtol=1e-4, atol=2e-5)
            assert list(ranks) == (1 + (at > expected_values[:, :1]).sum(1)).tolist()
