"""64 greedy tokens through scheduler, worker and sampler equal transformers': every family, one
rank and two, prompts chunked and whole, several requests at once, and behind a cached prefix."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.engine.models.engine_rank import MODES
from tests.engine.models.parity_cases import NUM_GREEDY, prompts
from tests.engine.models.reference_models import (
    FAMILIES,
    reference,
    reference_greedy,
)

_CLEAR_LEAD = 2e-4
"""Ours differ from the reference by less than 1e-5. One whose best two logits are closer than this
would prove nothing either way."""


@cache
def expected_tokens(folder: Path) -> list[list[int]]:
    model = reference(folder)
    expected = []
    for prompt in prompts():
        tokens, lead = reference_greedy(model, prompt)
        assert lead > _CLEAR_LEAD
        expected.append(tokens)
    return expected


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(
    family: str,
    mode: str,
    tp_size: int,
    checkpoints: Path,
    greedy_by_rank: dict[int, list[dict[str, list[int]]]],
) -> None:
    expected = expected_tokens(checkpoints / family)
    for ours in greedy_by_rank[tp_size]:
        for index, tokens in enumerate(expected):
            assert len(tokens) == NUM_GREEDY
            assert ours[f"{family}/{mode}/{index}"] == tokens
