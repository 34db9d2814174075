"""Reading adapters: what is served, and that everything else is refused by its name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.adapters.adapter_files import AdapterError, read_adapter
from engine.worker.worker import Worker
from tests.engine.lora.adapted_engine import Adapted
from tests.engine.lora.adapter_checkpoints import AdapterShape, write_adapter

MAX_RANK = 16
_MATRIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(adapted_family: Callable[[str], Adapted], tmp_path: Path) -> Path:
    """Returns the folder of an adapter that may be spoiled."""
    write_adapter(tmp_path, adapted_family("llama").model, AdapterShape(1))
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "lora_only"}, "bias: lora_only"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA.*cannot be merged either"),
        ({"use_bdlora": {"nblocks": 2}}, "diagonal blocks .use_bdlora.*merge it into the model"),
        ({"kasa_config": {"beta": 0.1}}, "KaSA"),
        ({"monteclora_config": {"n": 1}}, "at random"),
        ({"velora_config": {"groups": 1}}, "VeLoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"rank_pattern": {"layers.[01].mlp": 4}}, "layers.\\[01\\].mlp"),
        ({"r": 4}, "rank 4"),
        ({"r": "eight"}, "no adapter's configuration"),
    ],
)
def test_another_kind_of_adapter_is_refused_by_name(
    adapter: Path, changes: dict[str, Any], said: str
) -> None:
    read_adapter(adapter, MAX_RANK)
    change_config(adapter, **changes)
    with pytest.raises(AdapterError, match=said):
        read_adapter(adapter, MAX_RANK)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        (f"{_MATRIX}.lora_magnitude_vector", "DoRA"),
        (f"{_MATRIX}.bias", "biases"),
        ("base_model.model.lm_head.weight", "no matrix of LoRA"),
        ("base_model.model.lm_head.base_layer.weight", "has a copy of it"),
    ],
)
def test_a_tensor_of_another_kind_is_refused_by_name(adapter: Path, name: str, said: str) -> None:
    change_tensors(adapter, **{name: torch.zeros(8, 8)})
    with pytest.raises(AdapterError, match=said) as error:
        read_adapter(adapter, MAX_RANK)
    assert name in str(error.value)


def test_a_broken_file_is_refused(adapter: Path) -> None:
    change_tensors(adapter, **{f"{_MATRIX}.lora_B.weight": None})
    with pytest.raises(AdapterError, match="lora_A of .*q_proj and no lora_B"):
        read_adapter(adapter, MAX_RANK)
    path = adapter / "adapter_model.safetensors"
    lying = path.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[8,', 1)
    assert lying != path.read_bytes()
    for data in (path.read_bytes()[:-9], lying, b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little")):
        path.write_bytes(data)
        with pytest.raises(AdapterError):
            read_adapter(adapter, MAX_RANK)
    path.unlink()
    with pytest.raises(AdapterError, match="safetensors"):
        read_adapter(adapter, MAX_RANK)
    for config in (b"[" * 100_000, b'{"r": "\xff"}', b"8"):
        (adapter / "adapter_config.json").write_bytes(config)
        with pytest.raises(AdapterError, match="no adapter's configuration"):
            read_adapter(adapter, MAX_RANK)


def test_reading_takes_no_more_memory_than_there_are_bytes(adapter: Path) -> None:
    size = (adapter / "adapter_model.safetensors").stat().st_size
    tracemalloc.start()
    try:
        read_adapter(adapter, MAX_RANK)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * size + (8 << 20)


def test_a_rank_beyond_the_slots_is_refused_with_its_flag(
    adapted_family: Callable[[str], Adapted], tmp_path: Path
) -> None:
    write_adapter(tmp_path, adapted_family("llama").model, AdapterShape(1, rank=32))
    assert read_adapter(tmp_path, 32).rank == 32
    with pytest.raises(AdapterError, match="rank 32.*--max-lora-rank"):
        read_adapter(tmp_path, 16)


def test_patterns_name_modules_as_the_adapter_does(adapter: Path) -> None:
    """Adapters of whole models have modules behind a prefix that the decoder alone has not."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    inner = "base_model.model.model."
    save_file(
        {name.replace(inner, inner + "language_model."): t for name, t in tensors.items()},
        adapter / "adapter_model.safetensors",
    )
    name = "model.layers.0.self_attn.q_proj"
    before = read_adapter(adapter, MAX_RANK).modules[name]
    for prefix in ("model.language_model.", "language_model.", "^model.language_model."):
        pattern = prefix + name.removeprefix("model.")
        change_config(adapter, alpha_pattern={pattern: 7 * before.scale * before.rank})
        modules = read_adapter(adapter, MAX_RANK).modules
        assert modules[name].scale == pytest.approx(7 * before.scale)
        assert sum(module.scale != before.scale for module in modules.values()) == 1


def test_the_digest_tells_weights_and_configuration_apart(adapter: Path) -> None:
    digests = [read_adapter(adapter, MAX_RANK).digest]
    change_config(adapter, lora_alpha=17)
    digests.append(read_adapter(adapter, MAX_RANK).digest)
    weights = load_file(adapter / "adapter_model.safetensors")
    weights[f"{_MATRIX}.lora_A.weight"][0, 0] += 1
    change_tensors(adapter, **weights)
    digests.append(read_adapter(adapter, MAX_RANK).digest)
    assert len(set(digests)) == 3
    assert read_adapter(adapter, MAX_RANK).digest == digests[-1]


def test_what_does_not_fit_the_model_is_refused_by_its_module(
    adapted_family: Callable[[str], Adapted], adapter: Path
) -> None:
    models = adapted_family("llama")
    worker = Worker(models.config(lora=models.lora()), rank=0, rendezvous="")
    worker.init_device()
    worker.load_model(lambda fraction: None)
    digest = models.refs[0].digest
    worker.drop_adapter(digest)
    with pytest.raises(AdapterError, match="has changed since"):
        worker.load_adapter(digest, str(models.path(1)))
    for name, said in (
        (f"{_MATRIX}.lora_A.weight", "is for 48 outputs and 7 inputs of .*q_proj"),
        ("base_model.model.lm_head.lora_A.weight", "adapts lm_head"),
    ):
        write_adapter(adapter, models.model, AdapterShape(1))
        changes = {name: torch.zeros(8, 7)}
        changes.setdefault(name.replace("lora_A", "lora_B"), torch.zeros(48, 8))
        change_tensors(adapter, **changes)
        with pytest.raises(AdapterError, match=said):
            worker.load_adapter(read_adapter(adapter, MAX_RANK).digest, str(adapter))
    worker.shutdown()
