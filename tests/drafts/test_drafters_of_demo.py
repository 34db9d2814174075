"""Drafters that are trained for the demo model: what is trained is what the engine computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_model.drafters import DrafterRecipe, save, train
from demo_model.eagle3_head import TAPS, Eagle3Trainee
from demo_model.lesson import lesson
from demo_model.medusa_heads import MedusaTrainee
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from tandem_kernels.batch.batch_tables import RowTables
from tests.drafts.acceptance import Chats, config_of
from tests.drafts.draft_engines import Engine
from tests.drafts.draft_requests import Answers
from tests.drafts.parity import run

RECIPE = DrafterRecipe(steps=6, batch_size=2, warmup_steps=1)


@pytest.fixture(scope="module")
def model(demo_checkpoint: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    return torch.randint(6, 1024, (4, 40), generator=torch.Generator().manual_seed(1))


class Listening:
    """Passes drafts on, and keeps (known tokens, drafts) of each row."""

    def __init__(self, engine: Engine) -> None:
        drafts = engine.executor._worker.runner.drafts
        assert drafts.drafter is not None
        self._propose = drafts.drafter.propose
        self.heard: list[tuple[list[int], list[int]]] = []
        drafts.drafter = self

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        found = self._propose(idx_mapping, rows)
        for row, drafts in zip(idx_mapping.tolist(), found.tolist(), strict=True):
            known = rows.token_ids[row, : rows.total_len[row]].tolist()
            self.heard.append((known, drafts))
        return found


def heard_from(demo: Path, folder: Path, method: str) -> list[tuple[list[int], list[int]]]:
    """Returns what the engine drafts in a greedy answer, but for its end."""
    config = config_of(demo, folder, method, Chats(count=1))  # type: ignore[arg-type]
    engine = Engine(replace(config, cache=replace(config.cache, num_blocks=50)))
    listening = Listening(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    spec = RequestSpec([*range(30, 50)], sampling)
    run(engine, [EngineCoreRequest(request_id="a", spec=spec)], Answers())
    engine.close()
    return [(known, drafts) for known, drafts in listening.heard if len(known) < 20 + 12 - 3]


def test_the_engine_drafts_what_the_trained_head_guesses(
    demo_checkpoint: Path, tmp_path: Path, model: PreTrainedModel, texts: torch.Tensor
) -> None:
    torch.manual_seed(2)
    head = Eagle3Trainee(model, texts)
    losses = train(head, head.loss, model, texts, RECIPE)
    assert losses[-1] < losses[0]
    save(tmp_path / "eagle3", head.checkpoint(), head.config())
    heard = heard_from(demo_checkpoint, tmp_path, "eagle3")
    assert len(heard) >= 3
    for known, drafts in heard:
        seen = lesson(model, torch.tensor([known]))
        with torch.no_grad():
            feature = head.fc(torch.cat([seen.streams[layer] for layer in TAPS], dim=-1))
            embedded = F.embedding(seen.tokens, head.embedding)
            out, _, _ = head._layer(embedded, F.pad(feature, (0, 0, 1, -1)), None, None)
            logits = F.linear(head._normed(out, head.norm), head.lm_head)
        assert drafts[0] == head.kept[logits[0, -1].argmax()]


def test_the_engine_drafts_what_trained_medusa_heads_guess(
    demo_checkpoint: Path, tmp_path: Path, model: PreTrainedModel, texts: torch.Tensor
) -> None:
    heads = MedusaTrainee(model)
    losses = train(heads, heads.loss, model, texts, RECIPE)
    assert losses[-1] < losses[0]
    save(tmp_path / "medusa", heads.checkpoint(), heads.config())
    heard = heard_from(demo_checkpoint, tmp_path, "medusa")
    assert len(heard) >= 3
    for known, drafts in heard:
        x = lesson(model, torch.tensor([known[:-1]])).streams[-1][0, -1]
        guessed = [
            int(F.linear(x + F.silu(block(x)), head).argmax())
            for block, head in zip(heads.blocks, heads.heads, strict=True)
        ]
        assert drafts == guessed
