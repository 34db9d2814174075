"""Drafters that do not fit their model, or are of a kind that is not here, are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import DrafterName, ModelConfig
from engine.models.checkpoint import load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.models.errors import CheckpointError
from tests.engine.models.reference_models import FAMILIES, save_checkpoint
from tests.engine.worker.drafts import draft_checkpoints as drafts
from tests.engine.worker.drafts.test_network_drafters import (
    CASES,
    MAX_LEN,
    engine_config,
    with_drafter,
)
from tests.engine.worker.one_engine import OneEngine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_checkpoint(FAMILIES["llama"], folder)
    return folder


def model_of(target: Path) -> ModelConfig:
    return load_model_config(target, max_model_len=MAX_LEN)


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("eagle3", {"hidden_size": 96}, "hidden_size is 96, and must be 64"),
        ("eagle", {"vocab_size": 500}, "vocab_size is 500, and must be 101"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2, and must be 1"),
        ("eagle3", {"draft_vocab_size": 102}, "draft_vocab_size is 102"),
        ("eagle3", {"target_hidden_size": 32}, "target_hidden_size is 32"),
        ("eagle3", {"embed_requires_grad": True}, "embed_requires_grad, an embedding of its own"),
        (
            "eagle3",
            {"transformer_layer_config": {"model_type": "mistral"}},
            "transformer_layer_config.model_type 'mistral' is not supported",
        ),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}},
            r"eagle_aux_hidden_state_layer_ids asks for layers \[1, 2, 10\] of a model with 3",
        ),
        (
            "eagle3",
            {"speculators_model_type": "peagle"},
            r"is a drafter of the kind peagle \(speculators_model_type\)",
        ),
        ("eagle", {"speculators_model_type": "eagle3"}, "choose the method eagle3"),
        (
            "eagle3",
            {"dflash_config": {"mask_token_id": 5}, "num_hidden_layers": 5},
            r"is a drafter of the kind dflash \(dflash_config\)",
        ),
        ("medusa", {"num_heads": "many"}, "num_heads"),
        ("medusa", {"truncated_vocab_size": 7}, "truncated_vocab_size is not supported"),
        ("draft_model", {"vocab_size": 90}, "vocab_size is 90"),
        ("draft_model", {"max_position_embeddings": 64}, "max_position_embeddings is 64"),
    ],
)
def test_a_drafter_that_does_not_fit_is_named(
    target: Path, tmp_path: Path, method: DrafterName, changes: dict[str, Any], named: str
) -> None:
    write = next(case[1] for case in CASES.values() if case[0] == method)
    write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=named):
        read_draft(method, str(tmp_path), model_of(target))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", "has latent attention"),
        ("layers.0.mlp.up_proj.weight_scale", "has quantised weights"),
    ],
)
def test_a_head_of_another_form_is_told_by_its_tensors(
    target: Path, tmp_path: Path, name: str, said: str
) -> None:
    drafts.write_eagle3(tmp_path, speculators=True)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, name: torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{said} \({re.escape(name)}\)"):
        read_draft("eagle3", str(tmp_path), model_of(target))


def test_a_checkpoint_without_layers_that_predict_has_no_mtp(target: Path) -> None:
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 0"):
        read_draft("mtp", str(target), model_of(target))


def test_weights_that_are_wrong_are_named(target: Path, tmp_path: Path) -> None:
    drafts.write_eagle3(tmp_path)
    config = with_drafter(engine_config(target), "eagle3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    distances = weights["d2t"] + config.model.vocab_size
    save_file(weights | {"d2t": distances}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t: has indices from"):
        OneEngine(config, depth=1)
    del weights["midlayer.hidden_norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks midlayer\.hidden_norm\.weight"):
        OneEngine(config, depth=1)
