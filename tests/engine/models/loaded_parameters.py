"""Loads a checkpoint as a rank does, and compares what ranks hold of two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig, ModelConfig
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.parallel.place import ParallelPlace
from tests.engine.parallel.fake_group import FakeGroup

RANKS = ((0, 1), (0, 2), (1, 2))


def parameters(folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    return parameters_of(replace(load_model_config(folder), dtype="float32"), rank, size)


def parameters_of(model_config: ModelConfig, rank: int, size: int) -> dict[str, torch.Tensor]:
    config = EngineConfig(engine_id="load", epoch=1, model=model_config)
    place = ParallelPlace(range(config.model.num_layers), FakeGroup(rank, size))
    model = create_model(config, place, "cpu")
    load_weights(model, config, lambda fraction: None)
    return dict(model.named_parameters())


def check_same(ours: Path, expected: Path) -> None:
    """Asserts that every rank of one and of two holds the same of both checkpoints."""
    for rank, size in RANKS:
        first, second = (parameters(folder, rank, size) for folder in (ours, expected))
        assert first.keys() == second.keys()
        for name, tensor in second.items():
            assert torch.equal(first[name], tensor), (name, rank, size)
