"""Mistral's own form of a checkpoint, where there is no other: `params.json`, said as config.json.

    params.json                   sizes, by other names
    consolidated*.safetensors     tensors by other names (`engine.models.specs.mistral_native`)
    tekken.json                   the tokenizer (`engine.models.vocabularies`)

Most releases have Hugging Face's form beside it, which is then read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.models.config.json_file import read_json
from engine.models.errors import CheckpointError

CONFIG_FILE, PARAMS_FILE = "config.json", "params.json"
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "route_every_n": "moe_layer_freq",
}
_DEFAULT_LENGTH = 128_000
_END = 2
"""This is `</s>` in every tekken.json."""
_HUGGING_FACE = "use the release in Hugging Face's form, with a config.json"
_File = TypeVar("_File")


def config_path(folder: Path) -> Path:
    """Returns the file that says what a checkpoint is: config.json, unless only params.json is
    there."""
    own = folder / CONFIG_FILE
    return folder / PARAMS_FILE if is_native(folder) else own


def is_native(folder: Path) -> bool:
    """Returns whether a folder has Mistral's own form alone."""
    return not (folder / CONFIG_FILE).is_file() and (folder / PARAMS_FILE).is_file()


def read_config(path: Path, kind: type[_File]) -> _File:
    """Reads what `config_path` found, as config.json would say it. Raises `CheckpointError`."""
    if path.name != PARAMS_FILE:
        return read_json(path, kind)
    try:
        return msgspec.convert(_config(path, read_json(path, dict[str, Any])), kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(path, str(error), "correct the field") from error


def _config(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    is_latent = bool(params.get("qk_nope_head_dim"))
    experts = params.get("moe") or {}
    for what, is_asked in (
        ("moe", bool(experts) and not is_latent),
        ("qk_nope_head_dim", is_latent and not experts),
        ("sliding_window", isinstance(params.get("sliding_window"), list)),
        ("multimodal", "whisper_model_args" in (params.get("multimodal") or {})),
        ("model_type", params.get("model_type", "transformer") != "transformer"),
    ):
        if is_asked:
            raise CheckpointError(path, f"asks for a kind of model by {what}", _HUGGING_FACE)
    config = {new: params[old] for old, new in _SIZES.items() if params.get(old) is not None}
    config |= {new: experts[old] for old, new in _EXPERTS.items() if experts.get(old) is not None}
    length = params.get("max_position_embeddings") or params.get("max_seq_len")
    name = "MistralLarge3ForCausalLM" if is_latent else "MistralNativeForCausalLM"
    return config | {
        "architectures": [name],
        "max_position_embeddings": length or _DEFAULT_LENGTH,
        "sliding_window": params.get("sliding_window"),
        "norm_topk_prob": True,
        "eos_token_id": _END,
        "dtype": params.get("dtype"),
        "rope_parameters": _rope(params, is_latent=is_latent),
        "quantization_config": _quantization(path, params.get("quantization")),
    }


def _rope(params: Mapping[str, Any], *, is_latent: bool) -> dict[str, Any]:
    growth = params.get("llama_4_scaling") or {}
    rope: dict[str, Any] = {"rope_theta": params.get("rope_theta")}
    if (yarn := params.get("yarn")) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.get("factor"),
            "original_max_position_embeddings": yarn.get("original_max_position_embeddings"),
            "beta_fast": yarn.get("beta"),
            "beta_slow": yarn.get("alpha"),
        }
        if yarn.get("apply_scale") is False:
            rope["attention_factor"] = 1.0
        elif is_latent:
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if growth:
        rope["llama_4_scaling_beta"] = growth.get("beta")
        # Both numbers are one in what was released.
        rope["original_max_position_embeddings"] = growth.get("original_max_position_embeddings")
    return rope


def _quantization(path: Path, said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not said:
        return None
    if said.get("qformat_weight") == "fp8_e4m3":
        scheme = "dynamic" if said.get("qscheme_act") == "NO_SCALES" else "static"
        return {"quant_method": "fp8", "activation_scheme": scheme}
    method = str(said.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**said, "quant_method": method}
    raise CheckpointError(path, f"asks for weights quantised by {dict(said)}", _HUGGING_FACE)
