"""Each family's kernels can be told from its config.json, without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import CacheConfig, DeviceConfig, EngineConfig
from engine.explain.explanation import Batch, explain
from engine.models.checkpoint import load_model_config
from tandem_kernels.device import KNOWN_GPUS
from tests.engine.models.reference_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_explained(checkpoints: Path, family: str) -> None:
    model = load_model_config(
        checkpoints / family, load_format="dummy", dtype="auto", hashes_later=True
    )
    config = EngineConfig(
        engine_id="explained", epoch=1, model=model, cache=CacheConfig(block_size=16),
        device=DeviceConfig(device="cuda"),
    )  # fmt: skip
    for found in explain(config, KNOWN_GPUS["h200"], [Batch(3, 40), Batch(prompts=(24,))]):
        told = sorted(layer for layers, rows in found.choices for layer in layers if rows)
        assert set(range(model.num_layers)) <= set(told)
