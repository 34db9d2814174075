"""Answers about images are those of transformers, token for token, however prompts are chunked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.images.image_config import ImageConfig
from engine.messages import EngineCoreRequest
from engine.models.checkpoint import load_model_config
from engine.request_spec import RequestSpec
from engine.sampling_params import SamplingParams
from tests.engine.images.vision_checkpoints import (
    Prompt,
    picture,
    prompt,
    reference_greedy,
    save_checkpoint,
)
from tests.engine.worker.one_engine import OneEngine

COUNT = 20


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(kind, tmp_path_factory.mktemp(kind))


def prompts(kind: str) -> list[Prompt]:
    """Returns prompts with 0, 1 and 3 images, of sizes with and without whole windows."""
    large, small, wide = (
        picture(kind, *size, seed) for seed, size in enumerate([(9, 6), (2, 3), (1, 11)])
    )
    return [prompt([], 1, 20), prompt([large], 2), prompt([small, large, wide], 3)]


def engine_of(folder: Path, **changes: Any) -> OneEngine:
    budget = changes.pop("budget", 128)
    images = {"max_images": 8, "has_encoder": True, "max_image_tokens": 54, **changes}
    config = EngineConfig(
        engine_id="images",
        epoch=1,
        model=load_model_config(folder),
        cache=CacheConfig(block_size=8, num_blocks=128),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        images=ImageConfig(**images),
    )
    return OneEngine(config, depth=2)


def request_of(name: str, asked: Prompt, count: int = COUNT) -> EngineCoreRequest:
    spec = RequestSpec(
        asked.tokens, SamplingParams(temperature=0.0, max_tokens=count), images=asked.spans
    )
    return EngineCoreRequest(request_id=name, spec=spec, pixels=asked.pixels)


@pytest.fixture(scope="module")
def expected(kind: str, folder: Path) -> list[list[int]]:
    return [reference_greedy(folder, kind, asked, COUNT) for asked in prompts(kind)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"budget": 24, "encoder_budget": 54}, {"encoder_budget": 54, "cache_tokens": 60}],
)
def test_tokens_are_those_of_transformers(
    kind: str, folder: Path, expected: list[list[int]], changes: dict[str, int]
) -> None:
    engine = engine_of(folder, **changes)
    for index, asked in enumerate(prompts(kind)):
        engine.add(request_of(f"first-{index}", asked))
    engine.finish()
    for index, asked in enumerate(prompts(kind)):
        engine.add(request_of(f"again-{index}", asked))
    engine.finish()
    for index, tokens in enumerate(expected):
        assert engine.tokens[f"first-{index}"] == tokens
        assert engine.tokens[f"again-{index}"] == tokens
    assert engine.scheduler.stats().prefix_cache_hits > 0
    assert engine.scheduler.check_empty() == []
