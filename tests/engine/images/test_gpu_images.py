"""Images on a GPU: the tower computes what it computes on the CPU, and recorded steps decode behind
images as steps do whose kernels are launched one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from engine.images.image_config import ImageConfig
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_tower
from engine.models.loader import load_weights
from engine.parallel.place import ParallelPlace
from tests.engine.images.test_vision_parity import prompts, request_of
from tests.engine.images.vision_checkpoints import picture, save_checkpoint
from tests.engine.images.vision_families import FAMILIES
from tests.engine.worker.one_engine import OneEngine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(kind, tmp_path_factory.mktemp(kind))


def config_of(folder: Path, dtype: str, device: DeviceConfig) -> EngineConfig:
    return EngineConfig(
        engine_id="images",
        epoch=1,
        model=load_model_config(folder, dtype=dtype),
        cache=CacheConfig(block_size=16, num_blocks=256),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
        device=device,
        images=ImageConfig(max_images=8, has_encoder=True, max_image_tokens=54),
    )


def test_the_tower_computes_what_it_computes_on_the_cpu(kind: str, folder: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        config = config_of(folder, "float32", DeviceConfig(device=device))
        tower = create_tower(config, ParallelPlace(range(3)), device)
        assert tower is not None
        load_weights(tower, config, lambda fraction: None, is_tower=True)
        rows, columns = (FAMILIES[kind].grids or ((9, 6),))[0]
        found.append(tower.encode(picture(kind, rows, columns, 0).pixels).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-3)


def test_recorded_steps_decode_behind_images(kind: str, folder: Path) -> None:
    answers = []
    graphs = DeviceConfig(device="cuda", disabled_fast_paths=("prompt-graphs",))
    for device in (graphs, replace(graphs, enforce_eager=True)):
        engine = OneEngine(config_of(folder, "bfloat16", device), depth=2)
        engine.worker.capture_model(lambda what, fraction: None)
        for index, asked in enumerate(prompts(kind)):
            engine.add(request_of(str(index), asked))
            engine.finish()
        answers.append(dict(engine.tokens))
        engine.worker.shutdown()
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0].values()}) == 3
