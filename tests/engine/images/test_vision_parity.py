"""Answers about images are those of transformers, token for token, however prompts are chunked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.core.core import EngineCore
from engine.images.image_config import ImageConfig
from engine.models.checkpoint import load_model_config
from tests.engine.images.vision_checkpoints import (
    Prompt,
    picture,
    prompt,
    reference_beams,
    reference_greedy,
    save_checkpoint,
)
from tests.engine.images.vision_families import FAMILIES
from tests.engine.kv_groups.grouped_node import GroupedNode, run_until
from tests.engine.thread_executor import ThreadExecutor
from tests.engine.worker.one_engine import OneEngine

COUNT = 20


CASES: list[tuple[str, dict[str, int]]] = [
    ("qwen2_5", {}),
    ("qwen2_5", {"budget": 24, "encoder_budget": 54}),
    ("qwen2_5", {"encoder_budget": 54, "cache_tokens": 60}),
    ("qwen3", {"budget": 24, "encoder_budget": 54}),
    ("qwen3_moe", {"budget": 24, "encoder_budget": 54}),
    ("qwen3_5_moe", {"budget": 24, "encoder_budget": 54}),
    ("pixtral", {}),
    ("pixtral", {"budget": 24, "encoder_budget": 54}),
    ("glm4v", {"budget": 24, "encoder_budget": 54}),
    ("glm46v", {"budget": 24, "encoder_budget": 54}),
    ("kimi", {"budget": 24, "encoder_budget": 54}),
    ("minimax_m3", {"budget": 24, "encoder_budget": 54}),
    ("gemma4", {}),
    ("gemma4", {"budget": 40}),
    ("gemma4_patches", {"budget": 40}),
    ("muse", {"budget": 24, "encoder_budget": 54}),
    ("gemma4_small", {"budget": 24, "encoder_budget": 54}),
    ("gemma3", {}),
    ("gemma3", {"budget": 18}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in FAMILIES}


def prompts(kind: str) -> list[Prompt]:
    """Returns prompts with 0, 1 and 3 images, of sizes with and without whole windows."""
    sizes = (FAMILIES[kind].grids * 3)[:3] or [(9, 6), (2, 3), (1, 11)]
    large, small, wide = (picture(kind, *size, seed) for seed, size in enumerate(sizes))
    return [prompt([], 1, 20), prompt([large], 2), prompt([small, large, wide], 3)]


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    budget, parallel = changes.pop("budget", 128), changes.pop("parallel", ParallelConfig())
    images = {"max_images": 8, "has_encoder": True, "max_image_tokens": 54, **changes}
    return EngineConfig(
        engine_id="images",
        epoch=1,
        model=load_model_config(folder),
        cache=CacheConfig(block_size=8, num_blocks=256),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        images=ImageConfig(**images),
        parallel=parallel,
    )


def engine_of(folder: Path, **changes: Any) -> OneEngine:
    return OneEngine(config_of(folder, **changes), depth=2)


def request_of(name: str, asked: Prompt, count: int = COUNT) -> EngineCoreRequest:
    spec = RequestSpec(
        asked.tokens, SamplingParams(temperature=0.0, max_tokens=count), images=asked.spans
    )
    return EngineCoreRequest(request_id=name, spec=spec, pixels=asked.pixels)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {
        kind: [reference_greedy(folder, kind, asked, COUNT) for asked in prompts(kind)]
        for kind, folder in folders.items()
    }


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_tokens_are_those_of_transformers(
    kind: str,
    folders: dict[str, Path],
    expected: dict[str, list[list[int]]],
    changes: dict[str, int],
) -> None:
    engine = engine_of(folders[kind], **changes)
    for index, asked in enumerate(prompts(kind)):
        engine.add(request_of(f"first-{index}", asked))
    engine.finish()
    for index, asked in enumerate(prompts(kind)):
        engine.add(request_of(f"again-{index}", asked))
    engine.finish()
    for index, tokens in enumerate(expected[kind]):
        assert engine.tokens[f"first-{index}"] == tokens
        assert engine.tokens[f"again-{index}"] == tokens
    assert engine.scheduler.stats().prefix_cache_hits > 0
    assert engine.scheduler.check_empty() == []


def test_groups_see_images(folders: dict[str, Path], expected: dict[str, list[list[int]]]) -> None:
    """Each data-parallel group has an encoder of its own, with a budget and a cache, beside which
    the other group decodes or computes text."""
    parallel = ParallelConfig(data_parallel_size=2)
    config = config_of(folders["qwen3"], budget=24, encoder_budget=54, parallel=parallel)
    executor = ThreadExecutor(config)
    node = GroupedNode(config, EngineCore(config, executor, lambda *_: None), executor, None)
    try:
        for turn in range(2):
            for index, asked in enumerate(prompts("qwen3")):
                node.tokens[name := f"{turn}.{index}"] = []
                node.core.handle(request_of(name, asked))
            run_until([node], lambda: len(node.ended) == 3 * (turn + 1))  # noqa: B023
        for turn in range(2):
            found = [node.tokens[f"{turn}.{index}"] for index in range(3)]
            assert found == expected["qwen3"]
        stats = node.core.stats()
        assert stats.images is not None and stats.images.num_encoded_tokens > 0
        run_until([node], lambda: not node.core.scheduler.check_empty())
    finally:
        node.shutdown()


@pytest.mark.parametrize("kind", ["qwen2_5", "qwen3"])
def test_beams_behind_images_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    """The encoder's cache is too small for all images: beams that lose their blocks need theirs
    again."""
    engine = engine_of(folders[kind], budget=32, encoder_budget=54, cache_tokens=60)
    for index, asked in enumerate(prompts(kind)):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, beam=BeamParams(3)
        )
        names = tuple(f"{index}.{i}" for i in range(3))
        spec = RequestSpec(asked.tokens, sampling, images=asked.spans, sibling_seeds=(1, 2))
        engine.add(
            EngineCoreRequest(
                request_id=f"{index}", spec=spec, pixels=asked.pixels, choice_ids=names
            )
        )
    engine.finish()
    for index, asked in enumerate(prompts(kind)):
        found = [engine.tokens[f"{index}.{i}"] for i in range(3)]
        assert found == reference_beams(folders[kind], kind, asked, 8, 3), index
    assert engine.scheduler.check_empty() == []
