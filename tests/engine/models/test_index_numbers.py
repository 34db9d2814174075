"""Whole numbers of a checkpoint that index something are in range, or nothing is served."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from engine.config import EngineConfig
from engine.models.base import CausalLM
from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from tests.engine.models.family import Family
from tests.engine.models.reference_models import save_checkpoint
from tests.engine.models.sparse_families import V4
from tests.engine.tiny_model import place_alone

NUM_EXPERTS = V4["n_routed_experts"]


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model whose only layer chooses experts by the token's id."""
    folder = tmp_path_factory.mktemp("hashed")
    one = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    save_checkpoint(Family(DeepseekV4ForCausalLM, DeepseekV4Config, V4 | one), folder)
    return folder


def load(folder: Path, load_format: Literal["dummy", "safetensors"]) -> CausalLM:
    model = load_model_config(folder, load_format=load_format)
    config = EngineConfig(engine_id="indices", epoch=1, model=model)
    created = create_model(config, place_alone(model), "cpu")
    load_weights(created, config, lambda fraction: None)
    return created


def test_dummy_weights_choose_experts_that_exist(hashed: Path) -> None:
    [table] = [p for name, p in load(hashed, "dummy").named_parameters() if name.endswith("table")]
    assert set(table.unique().tolist()) == set(range(NUM_EXPERTS))


@pytest.mark.parametrize("number", [-1, NUM_EXPERTS])
def test_a_table_of_experts_beyond_the_last_is_refused(
    number: int, hashed: Path, tmp_path: Path
) -> None:
    weights = load_file(hashed / "model.safetensors")
    [name] = [name for name in weights if name.endswith("tid2eid")]
    weights[name] = weights[name].index_fill(0, torch.tensor([5]), number)
    (tmp_path / "config.json").write_bytes((hashed / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tid2eid: .* must be from 0 to {NUM_EXPERTS - 1}"):
        load(tmp_path, "safetensors")
