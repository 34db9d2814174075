"""A Llama that fits into a test."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.config import ModelConfig
from engine.models.specs.llama import LlamaSpec
from engine.parallel.place import ParallelPlace
from engine.rope import Rotary

_TINY: dict[str, Any] = {
    "path": "",
    "served_model_name": "tiny",
    "architecture": "LlamaForCausalLM",
    "vocab_size": 211,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_model_len": 96,
    "eos_token_ids": (0,),
    "dtype": "float32",
    "load_format": "dummy",
    "model_hash": "tiny",
}


_TINY_SPEC: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rotary": Rotary(theta=10_000.0, dim=8),
    "tie_word_embeddings": False,
}


def tiny_model(**changes: Any) -> ModelConfig:
    """Makes a model; `changes` are fields of `ModelConfig` or of `LlamaSpec`."""
    of_spec = {name: changes.pop(name, value) for name, value in _TINY_SPEC.items()}
    spec = msgspec.to_builtins(LlamaSpec(**of_spec))
    return ModelConfig(**{**_TINY, "spec": spec, **changes})


def place_alone(model: ModelConfig) -> ParallelPlace:
    """Returns the place of a rank without others."""
    return ParallelPlace(range(model.num_layers))
