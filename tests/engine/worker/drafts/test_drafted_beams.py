"""Beams draft nothing themselves, whatever drafts beside them, and drafts change no beam."""

from __future__ import annotations

from pathlib import Path

from tests.engine.models.reference_models import FAMILIES, save_checkpoint
from tests.engine.models.test_beam_search import BEAMS, PROMPTS, asked, check, expected
from tests.engine.worker.drafts import draft_checkpoints as drafts
from tests.engine.worker.drafts.test_network_drafters import (
    engine_config,
    greedy_requests,
    watch,
    with_drafter,
)
from tests.engine.worker.drafts.test_speculation import run
from tests.engine.worker.one_engine import OneEngine, check_empty


def test_beams_beside_requests_that_draft(tmp_path: Path) -> None:
    """The drafter has KV of its own, blocks are few, and all of them have the same prompts."""
    target = tmp_path / "target"
    save_checkpoint(FAMILIES["llama"], target)
    drafts.write_eagle3(tmp_path / "draft")
    config = with_drafter(engine_config(target, num_blocks=24), "eagle3", tmp_path / "draft")
    requests = greedy_requests(config.model.vocab_size)
    alone = run(engine_config(target), 1, requests)
    engine = OneEngine(config, depth=2)
    drafted = watch(engine.worker.runner)
    for number, prompt in enumerate(PROMPTS):
        for i, beam in enumerate(BEAMS[:2]):
            engine.add(asked(f"beam-{number}-{i}", prompt, beam, 3))
    for request in requests:
        engine.add(request)
    engine.finish()
    for number in range(len(PROMPTS)):
        for i, beam in enumerate(BEAMS[:2]):
            check(engine, f"beam-{number}-{i}", expected(target, number, beam, 3))
    for name, tokens in alone.tokens.items():
        assert engine.tokens[name] == tokens
    ends = {tuple(p.spec.prompt_token_ids) for p in requests}
    assert drafted and all(
        any(tuple(known[: len(p)]) == p for p in ends) for known, _, _ in drafted
    )
    assert engine.scheduler.stats().drafts.num_draft_tokens > 0
    check_empty(engine)
