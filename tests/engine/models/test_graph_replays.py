"""Graphs compute what their kernels do one by one, whatever lengths they are replayed with: each
kind of family answers prompts of random lengths from its graphs, and once more without.

A graph is recorded with one long prompt, so what it does by the lengths it saw would be wrong of
others. On a CPU what it holds is run by hand: see `GraphsByHand`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, Device, DeviceConfig, EngineConfig, SchedulerConfig
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.attention import selection
from engine.layers.attention.latent_backend import LatentBackend
from engine.models import recorded_steps
from engine.models.checkpoint import load_model_config
from engine.worker import model_runner
from tests.engine.models.engine_rank import EngineRank, Found
from tests.engine.models.parity_cases import VOCAB
from tests.engine.worker.graphs.test_prompt_graphs import GraphsByHand

KINDS = [
    "deepseek_v2", "deepseek_v32", "deepseek_v4", "gemma4_shared", "gpt_oss", "kimi_linear",
    "minimax_m3", "nemotron_h", "qwen3_next",
]  # fmt: skip
"""A family for each kind of attention, state and choice."""
BY_HAND = [
    ("deepseek_v2", False), ("deepseek_v32", False), ("deepseek_v32", True), ("deepseek_v4", False),
    ("gpt_oss", False), ("minimax_m3", False), ("qwen3_next", False),
]  # fmt: skip
"""Those whose host chooses anything, and whether in deterministic mode."""
ROUNDS = ((5, 150, True), (4, 18, False), (2, 40, False), (2, 6, True))
"""Requests that come together, their longest prompt, and whether they ask for log probabilities:
graphs of such steps end with logits."""
BUDGET = 96
SHORT, LONG = (16, 32), (64, BUDGET)
"""Tokens of graphs with prompts."""


class AllGraphsByHand(GraphsByHand):
    """Records nothing: a replay by hand runs what recording would."""

    def capture(self, run: Callable[[GraphKey], None], report: Callable[[float], None]) -> None:
        self._run, self.replayed = run, []


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the sizes of graphs, and of what is done by size, those of tiny models' prompts."""
    monkeypatch.setattr(recorded_steps, "PROMPT_TOKENS", SHORT)
    monkeypatch.setattr(recorded_steps, "LONG_PROMPT_TOKENS", LONG)
    for longer in ("LONGEST_PROMPT_TOKENS", "MOST_PROMPT_TOKENS", "FP8_PROMPT_TOKENS"):
        monkeypatch.setattr(recorded_steps, longer, (BUDGET,))
    latents = selection._latent_backend

    def backend(*given: Any) -> LatentBackend:
        return replace(latents(*given), fewest_tokens=6, fewest_of_step=SHORT[-1] + 1)

    monkeypatch.setattr(selection, "_latent_backend", backend)


def make_engine(checkpoint: Path, device: Device, *, deterministic: bool) -> EngineRank:
    config = EngineConfig(
        engine_id="replays",
        epoch=1,
        model=load_model_config(checkpoint),
        cache=CacheConfig(block_size=16, num_blocks=160, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=BUDGET),
        device=DeviceConfig(device=device, deterministic=deterministic),
    )
    return EngineRank(config, 0, "")


def answers(engine: EngineRank) -> list[dict[str, Found]]:
    chance, found = random.Random(11), []
    for count, longest, scored in ROUNDS:
        asked = {
            str(index): [chance.randrange(VOCAB) for _ in range(chance.randint(1, longest))]
            for index in range(count)
        }
        found.append(engine.run(asked, max_tokens=2, logprobs=2 if scored else None))
    return found


@pytest.mark.parametrize(("family", "deterministic"), BY_HAND)
def test_replays_by_hand_equal_launches(
    family: str, deterministic: bool, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "is_gpu", lambda device: True)
    monkeypatch.setattr(model_runner, "CudaGraphManager", AllGraphsByHand)
    engine = make_engine(checkpoints / family, "cpu", deterministic=deterministic)
    runner = engine.worker.runner
    runner.capture_model(lambda fraction: None)
    graphs = runner._graphs
    replayed = answers(engine)
    runner.drop_graphs()
    check_close(replayed, answers(engine))
    engine.close()
    assert isinstance(graphs, AllGraphsByHand)
    sizes = {key.num_tokens for key in graphs.replayed if not key.decodes}
    assert sizes >= {*SHORT, LONG[0]}
    assert any(key.decodes for key in graphs.replayed)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_replays_on_a_gpu_equal_launches(
    family: str, deterministic: bool, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deterministic mode bit for bit. Only the kernels of these steps are compiled."""
    monkeypatch.setattr(model_runner.ModelRunner, "warm_up", lambda runner, report: None)
    engine = make_engine(checkpoints / family, "cuda", deterministic=deterministic)
    replayed = answers(engine)
    engine.worker.runner.drop_graphs()
    launched = answers(engine)
    engine.close()
    if deterministic:
        assert replayed == launched
    else:
        check_close(replayed, launched)


def check_close(replayed: list[dict[str, Found]], launched: list[dict[str, Found]]) -> None:
    for ours, theirs in zip(replayed, launched, strict=True):
        for request, one in ours.items():
            other = theirs[request]
            assert one.tokens == other.tokens and len(one.tokens) == 2
            for (ids, values, rank), expected in zip(one.logprobs, other.logprobs, strict=True):
                assert (ids, rank) == (expected[0], expected[2])
                torch.testing.assert_close(values, expected[1], rtol=1e-4, atol=2e-5)
