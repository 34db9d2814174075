"""A Llama that fits into a test."""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig

_TINY: dict[str, Any] = {
    "path": "",
    "served_model_name": "tiny",
    "architecture": "LlamaForCausalLM",
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "qk_norm": False,
    "max_model_len": 96,
    "eos_token_ids": (0,),
    "dtype": "float32",
    "load_format": "dummy",
    "model_hash": "tiny",
}


def tiny_model(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**_TINY, **changes})
