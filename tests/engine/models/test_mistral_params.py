"""Mistral's own form of a checkpoint is the model that Hugging Face's form is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import CheckpointError, load_model_config, resolve_model
from engine.models.files import hub
from engine.models.files.weight_files import WeightFiles
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.quantization import Fp8Scheme
from tests.engine.models.loaded_parameters import check_same

Json = dict[str, Any]

_OWN_NAMES = (
    (r"^model\.", ""),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn", "attention"),
    (r"mlp\.(gate|experts|shared_experts)\b", r"\1"),
    (r"mlp", "feed_forward"),
    (r"\bq_proj", "wq"), (r"\bk_proj", "wk"), (r"\bv_proj", "wv"), (r"\bo_proj", "wo"),
    (r"gate_proj", "w1"), (r"down_proj", "w2"), (r"up_proj", "w3"),
    (r"q_a_proj", "wq_a"), (r"q_b_proj", "wq_b"), (r"q_a_layernorm", "q_a_norm"),
    (r"kv_a_proj_with_mqa", "wkv_a_with_mqa"), (r"kv_a_layernorm", "kv_a_norm"),
    (r"kv_b_proj", "wkv_b"),
    (r"^embed_tokens", "tok_embeddings"), (r"^lm_head", "output"),
)  # fmt: skip


def own_name(name: str) -> str:
    for expression, own in _OWN_NAMES:
        name = re.sub(expression, own, name)
    return name


def interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns queries or keys with the pairs that rotate behind each other."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def write_native(plain: Path, folder: Path, **more: Any) -> Json:
    """Writes a checkpoint in Mistral's form, with a vision tower that is not read. Returns its
    params.json."""
    config = json.loads((plain / "config.json").read_text())
    rope = config["rope_parameters"]
    is_latent = "kv_lora_rank" in config
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "hidden_dim": config["intermediate_size"], "norm_eps": config["rms_norm_eps"],
        "head_dim": config["head_dim"], "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_theta": rope["rope_theta"], "tied_embeddings": False, "model_type": "transformer",
        "yarn": {
            "factor": rope["factor"], "beta": 32, "alpha": 1, "apply_scale": is_latent,
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        },
        "llama_4_scaling": {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        },
        "vision_encoder": {"hidden_size": 16},
    }  # fmt: skip
    if is_latent:
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
            params[name] = config[name]
        params |= {"v_head_dim": config["v_head_dim"], "moe": _moe(config)}
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({**params, **more}))
    tensors = {"vision_encoder.patch_conv.weight": torch.ones(3)}
    for name, tensor in _one_by_one(load_file(plain / "model.safetensors")):
        if re.search(r"self_attn\.[qk]_proj\.", name):
            tensor = interleaved(tensor, config["head_dim"])
        tensors[own_name(name)] = tensor
    save_file(tensors, folder / "consolidated.safetensors")
    return params


def _one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields experts apart, which transformers writes as one tensor."""
    for name, tensor in tensors.items():
        block, is_stack, last = name.partition(".experts.")
        if not is_stack or tensor.dim() != 3:
            yield name, tensor
            continue
        names = ("gate_proj", "up_proj") if last.startswith("gate_up") else ("down_proj",)
        for expert, both in enumerate(tensor):
            for part, one in zip(names, both.chunk(len(names)), strict=True):
                yield f"{block}.experts.{expert}.{part}.weight", one.contiguous()


def _moe(config: Json) -> Json:
    return {
        "num_experts": config["n_routed_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "num_shared_experts": config["n_shared_experts"],
        "expert_hidden_dim": config["moe_intermediate_size"],
        "first_k_dense_replace": config["first_k_dense_replace"],
        "routed_scale": config["routed_scaling_factor"],
        "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "route_every_n": 1,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["ministral3", "mistral4"])
def test_it_is_the_model_of_the_other_form(family: str, checkpoints: Path, tmp_path: Path) -> None:
    plain, folder = checkpoints / family, tmp_path / "native"
    if family == "ministral3":
        plain = _without_magnitude(plain, tmp_path / "plain")
    write_native(plain, folder)
    check_same(folder, plain)
    ours, theirs = (spec_of(load_model_config(path)) for path in (folder, plain))
    assert isinstance(ours, DenseSpec) and isinstance(theirs, DenseSpec)
    rotary = msgspec.structs.replace(ours.rotary, interleaved=theirs.rotary.interleaved)
    assert (rotary, ours.query_scale) == (theirs.rotary, theirs.query_scale)
    assert (ours.latent, ours.sliding_window) == (theirs.latent, theirs.sliding_window)
    assert load_model_config(folder).eos_token_ids == (2,)


def _without_magnitude(plain: Path, folder: Path) -> Path:
    """Returns a copy whose YaRN multiplies nothing, as in all of Mistral's releases."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["rope_parameters"]["attention_factor"] = 1.0
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(plain / "model.safetensors")
    return folder


def test_config_json_counts_where_both_are(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    write_native(checkpoints / "ministral3", folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(checkpoints / "ministral3" / name)
    assert load_model_config(folder).architecture == "Ministral3ForCausalLM"
    assert "model.norm.weight" in WeightFiles(folder).tensors


def test_fp8_has_the_scales_of_other_releases(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "native"
    quantised = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    write_native(checkpoints / "ministral3", folder, quantization=quantised)
    path = folder / "consolidated.safetensors"
    scales = {
        "layers.0.attention.wq.qscale_weight": torch.tensor(0.5),
        "layers.0.attention.wq.qscale_act": torch.tensor(0.5),
    }
    save_file(load_file(path) | scales, path)
    model = load_model_config(folder)
    assert model.quantization is not None
    assert isinstance(model.quantization.scheme_of("model.layers.0.self_attn.q_proj"), Fp8Scheme)
    names = WeightFiles(folder, renamed=type(spec_of(model)).renamed_tensors).tensors
    assert {
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.input_scale",
    } <= set(names)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"moe": {"num_experts": 8}}, "moe"),
        ({"qk_nope_head_dim": 8}, "qk_nope_head_dim"),
        ({"sliding_window": [None, 512]}, "sliding_window"),
        ({"multimodal": {"whisper_model_args": {}}}, "multimodal"),
        ({"model_type": "mamba"}, "model_type"),
        ({"quantization": {"qformat_weight": "int3"}}, "int3"),
    ],
)
def test_what_is_not_read_is_named(
    more: Json, field: str, checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "native"
    write_native(checkpoints / "ministral3", folder, **more)
    with pytest.raises(CheckpointError, match=field):
        resolve_model(str(folder), load_format="dummy")


@pytest.mark.parametrize("has_both", [False, True])
def test_one_of_the_forms_is_downloaded(
    has_both: bool, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "hub", []
    write_native(checkpoints / "ministral3", folder)
    (folder / "tekken.json").write_text("{}")
    if has_both:
        (folder / "config.json").symlink_to(checkpoints / "ministral3" / "config.json")
        (folder / "model.safetensors").symlink_to(checkpoints / "ministral3" / "model.safetensors")

    def download(name: str, **options: Any) -> str:
        asked.append(options)
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_model("mistralai/some-model") == folder
    assert ("consolidated*.safetensors" in asked[-1]["ignore_patterns"]) == has_both
