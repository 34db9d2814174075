"""Requests of which one token is left to compute decode in their first step, with no drafts: what
they get is, bit for bit, what a prompt of one token would have got, and each step is one graph."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.sched.rows.draft_length import DraftLength
from engine.sched.rows.row import Row
from engine.worker import model_runner
from engine.worker.step_halves import Part, parts_of
from tests.engine.worker.drafts.test_draft_graphs import DecodeGraphsByHand
from tests.engine.worker.drafts.test_network_drafters import (
    CASES,
    engine_config,
    with_drafter,
)
from tests.engine.worker.drafts.test_speculation import with_ngrams
from tests.engine.worker.one_engine import OneEngine, check_empty

BLOCK_SIZE = 16
"""States make blocks this large; those of other models have half as many tokens."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.3, "min_tokens": 4},
    {"temperature": 0.7, "seed": 8, "logprobs": 1, "frequency_penalty": 0.5},
)


def requests_of(vocab_size: int, name: str) -> list[EngineCoreRequest]:
    """Returns prompts that end behind a whole block, with all that a step samples."""
    lengths = [size * BLOCK_SIZE + 1 for size in (2, 1, 3, 4)]
    return [
        EngineCoreRequest(
            request_id=f"{name}-{index}",
            spec=RequestSpec(
                [(7 * i * i + 3 * index) % vocab_size for i in range(length)],
                SamplingParams(max_tokens=10, ignore_eos=True, **fields),
            ),
        )
        for index, (length, fields) in enumerate(zip(lengths, SAMPLINGS, strict=True))
    ]


@pytest.mark.parametrize("lengths", [(), (4, 1, 2)], ids=["all drafts", "adaptive"])
@pytest.mark.parametrize(
    "case", ["mtp of qwen3_next", "mtp of nemotron_h", "mtp of ling3", "mtp of glm4_moe", "ngrams"]
)
def test_what_decodes_at_once_gets_is_what_a_prompt_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str, lengths: tuple[int, ...]
) -> None:
    """Decodes have as many tokens as drafts pay, or `lengths` by turns."""
    monkeypatch.setattr(model_runner, "CudaGraphManager", DecodeGraphsByHand)
    method, write, _ = CASES["mtp of qwen3_next" if case == "ngrams" else case]
    write(tmp_path)
    config = engine_config(tmp_path, num_blocks=120)
    config = with_ngrams(config, 4) if case == "ngrams" else with_drafter(config, method, tmp_path)
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, adaptive=bool(lengths)))
    vocab_size, results = config.model.vocab_size, []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(Row, "may_decode_at_once", False)
        turns = cycle(lengths)
        monkeypatch.setattr(DraftLength, "choose", lambda self, rows, of=turns: next(of))
        engine = OneEngine(config, depth=2)
        engine.worker.runner.capture_model(lambda fraction: None)
        for request in requests_of(vocab_size, "first"):
            engine.add(request)
        engine.finish()
        launched = note_parts(monkeypatch)
        beside, *others = requests_of(vocab_size, "again")
        for request in (msgspec.structs.replace(beside, request_id="beside"), *others):
            engine.add(request)
            engine.step()
            engine.step()
        engine.finish()
        results.append((engine.tokens, engine.logprobs))
        for request in others:
            name = request.request_id
            assert engine.tokens[name] == engine.tokens[name.replace("again", "first")]
        only_decodes = [order.num_decodes == len(order.rows) for order, _ in launched]
        assert all(only_decodes) == at_once
        assert not at_once or all(key is not None for _, key in launched)
        check_empty(engine)
    assert results[0] == results[1]


def note_parts(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Returns what steps are run as from now on."""
    found: list[Part] = []

    def note(*given: Any) -> list[Part]:
        parts = parts_of(*given)
        found.extend(parts)
        return parts

    monkeypatch.setattr(model_runner, "parts_of", note)
    return found
