"""The text part of models that take images: settings and tensors are found wherever releases have
put them, and nothing is skipped but the tower. That they compute as transformers does is in
`test_logit_parity`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.config.wrappers import WRAPPERS, text_config, with_own_names
from engine.models.registry import MODELS, spec_of
from engine.models.specs.dense import DenseSpec
from engine.parallel.distributed import ParallelGroup
from engine.quantization import matches
from tests.engine.models.parity_cases import prompts
from tests.engine.models.rank_process import make_paged_model

GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
"""Says as little as the published file does."""
QWEN25_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128_000,
    "vocab_size": 152_064,
    "rope_theta": 1_000_000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1280},
}
"""Has no text_config: all settings are in one."""


def read(folder: Path, config: dict[str, Any]) -> tuple[ModelConfig, DenseSpec]:
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model_config(folder, load_format="dummy")
    spec = spec_of(model)
    assert isinstance(spec, DenseSpec)
    return model, spec


def test_what_text_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    model, spec = read(tmp_path, GEMMA3_4B)
    assert (model.architecture, model.wrapper) == (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
    )
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.max_model_len) == (262_208, 131_072)
    assert (model.eos_token_ids, model.dtype) == ((1, 106), "bfloat16")
    assert spec.tie_word_embeddings and spec.sliding_window == 1024
    assert spec.rotary.scaling is not None and spec.rotary.theta == 1e6
    assert spec.rotary_of(0).scaling is None and spec.rotary_of(0).theta == 1e4


def test_settings_without_text_config(tmp_path: Path) -> None:
    model, spec = read(tmp_path, QWEN25_VL_7B)
    assert (model.architecture, model.num_layers) == ("Qwen2ForCausalLM", 28)
    assert spec.attention_bias and spec.sliding_window is None
    assert spec.rotary.scaling is None and spec.rotary.theta == 1e6


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_modules_of_a_quantisation_are_renamed(name: str) -> None:
    quantised = {
        "ignore": ["language_model.lm_head", "vision_tower.blocks.0", "re:.*norm"],
        "config_groups": {"group_0": {"targets": ["model.language_model.layers.0.mlp.up_proj"]}},
        "quant_method": "fp8",
    }
    whole = GEMMA3_4B | {name: quantised}
    found = text_config("Gemma3ForConditionalGeneration", whole)[name]
    assert found == {
        "ignore": ["lm_head", "vision_tower.blocks.0", "re:.*norm"],
        "config_groups": {"group_0": {"targets": ["model.layers.0.mlp.up_proj"]}},
        "quant_method": "fp8",
    }


@pytest.mark.parametrize(
    ("published", "layers"),
    [
        (r"re:model\.language_model\.layers\.0\..*", {0}),
        ("re:^language_model.model.layers.0.mlp", {0}),
        (r"re:.*language_model\.layers\.(0|1)\.", {0, 1}),
        ("re:.*language_model.*mlp.*", {0, 1, 2}),
        ("re:.*mlp", {0, 1, 2}),
        ("re:.*visual.*", set()),
        ("re:language_model.lm_head", {"lm_head"}),
    ],
)
def test_expressions_for_modules_are_of_the_whole_model(
    published: str, layers: set[int | str]
) -> None:
    """Layers that they name are not quantised, by compressed-tensors and by GPTQModel."""
    names: dict[int | str, str] = {i: f"model.layers.{i}.mlp.up_proj" for i in range(3)}
    names["lm_head"] = "lm_head"
    [pattern] = with_own_names([published])
    assert {key for key, name in names.items() if matches(pattern, name)} == layers
    [dynamic] = with_own_names({published.replace("re:", "-:"): {}})
    assert dynamic.replace("-:", "re:") == pattern


def wrap(plain: Path, folder: Path, name: str, prefixes: tuple[str, str], **whole: Any) -> Path:
    """Makes a wrapper of a decoder's checkpoint: `prefixes` are those of the decoder, in place of
    "model.", and of the head, in place of "lm_head."."""
    folder.mkdir()
    text = json.loads((plain / "config.json").read_text())
    config = {"architectures": [name], "model_type": "wrapper", "text_config": text, **whole}
    text.pop("architectures")
    (folder / "config.json").write_text(json.dumps(config))
    model, head = prefixes
    tensors = {
        head + key.removeprefix("lm_head.")
        if key.startswith("lm_head.")
        else model + key.removeprefix("model."): tensor
        for key, tensor in load_file(plain / "model.safetensors").items()
    }
    tensors["vision_tower.patch_embed.weight"] = torch.ones(3)
    tensors["mm_projector.proj.0.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    return folder


PUBLISHED = "language_model.model.", "language_model.lm_head."
NEWER = "model.language_model.", "lm_head."


@pytest.mark.parametrize(
    ("family", "name", "prefixes"),
    [
        ("kimi_k2", "KimiK25ForConditionalGeneration", PUBLISHED),
        ("kimi_k2", "Kimi_K25ForConditionalGeneration", NEWER),
        ("kimi_k3", "KimiK3ForConditionalGeneration", PUBLISHED),
        ("mistral", "Mistral3ForConditionalGeneration", NEWER),
        ("ministral3", "Mistral3ForConditionalGeneration", PUBLISHED),
        ("mistral4", "Mistral3ForConditionalGeneration", PUBLISHED),
        ("qwen2", "Qwen2_5_VLForConditionalGeneration", ("model.", "lm_head.")),
        ("qwen3_5_tied", "Qwen3_5ForConditionalGeneration", NEWER),
        ("qwen3_tied", "InternS1ForConditionalGeneration", NEWER),
        ("qwen2", "InternVLForConditionalGeneration", PUBLISHED),
        ("gemma3n", "Gemma3nForConditionalGeneration", NEWER),
        ("gemma4", "Gemma4ForConditionalGeneration", NEWER),
        ("gemma4", "Gemma4UnifiedForConditionalGeneration", NEWER),
    ],
)
def test_wherever_tensors_are_they_are_those_of_the_decoder(
    family: str, name: str, prefixes: tuple[str, str], checkpoints: Path, tmp_path: Path
) -> None:
    plain = checkpoints / family
    wrapped = wrap(plain, tmp_path / "wrapped", name, prefixes)
    prompt = prompts()[2]
    group = ParallelGroup(0, 1)
    [expected], [found] = (
        make_paged_model(folder, group).prefill([prompt], 1000) for folder in (plain, wrapped)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_nobody_speaks_of_is_tied_if_it_is_not_stored(
    tied: bool, checkpoints: Path, tmp_path: Path
) -> None:
    name = "Mistral3ForConditionalGeneration"
    folder = wrap(checkpoints / "mistral", tmp_path / "wrapped", name, PUBLISHED)
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    if tied:
        tensors = load_file(folder / "model.safetensors")
        del tensors["language_model.lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
    spec = spec_of(load_model_config(folder))
    assert isinstance(spec, DenseSpec) and spec.tie_word_embeddings == tied
    make_paged_model(folder, ParallelGroup(0, 1))


def test_only_the_tower_is_skipped(checkpoints: Path, tmp_path: Path) -> None:
    name = "Mistral3ForConditionalGeneration"
    folder = wrap(checkpoints / "mistral", tmp_path / "wrapped", name, PUBLISHED)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"depth_tower.conv.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not use: depth_tower.conv.weight"):
        make_paged_model(folder, ParallelGroup(0, 1))


def test_a_text_part_that_is_not_here(tmp_path: Path) -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {"model_type": "deepseek_v41"},
    }
    with pytest.raises(CheckpointError, match="nearest that it has is DeepseekV4ForCausalLM"):
        read(tmp_path, config)


def test_wrappers_are_of_architectures_that_are_here() -> None:
    assert {name for wrapper in WRAPPERS.values() for name in wrapper.text.values()} <= {*MODELS}


def test_a_wrong_field_of_text_config_is_named(tmp_path: Path) -> None:
    config = json.loads(json.dumps(GEMMA3_4B))
    config["text_config"]["hidden_size"] = "wide"
    with pytest.raises(CheckpointError, match=r"hidden_size.* in text_config"):
        read(tmp_path, config)
