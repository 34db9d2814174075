"""Turns what llama.cpp writes of an architecture into config.json and tensors as published.

    blk.0.attn_q.weight     model.layers.0.self_attn.q_proj.weight

Of Llama the rows of queries and keys are reordered for interleaved pairs; of Gemma the weights of
norms have a 1 added. Both are undone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.models.errors import CheckpointError
from engine.models.gguf.gguf_file import GgufFile, Numbers

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LAST_GLOBAL = 6
"""One layer of this many sees everything in Gemma 3."""


def _llama(file: GgufFile) -> dict[str, Any]:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if _ROPE_FACTORS not in file.names:
        return config
    factors = [float(factor) for factor in file.tensor(_ROPE_FACTORS)]
    scaling = {"rope_type": "longrope", "long_factor": factors, "short_factor": factors}
    return config | {"rope_scaling": scaling | {"attention_factor": 1.0}}


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _gemma3(file: GgufFile) -> dict[str, Any]:
    layers = range(file.size("block_count"))
    kinds = [
        "full_attention" if (i + 1) % _LAST_GLOBAL == 0 else "sliding_attention" for i in layers
    ]
    heads = file.size("attention.head_count")
    # Of the largest one a head is smaller than what its scores are scaled by.
    scalar = file.size("embedding_length") // heads if len(layers) == 62 else _head_dim(file)
    factor = file.own("rope.scaling.factor", float, 0.0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": file.size("attention.sliding_window"),
        **({"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {}),
    }


_CONFIGS: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _head_dim(file: GgufFile) -> int:
    computed = file.size("embedding_length") // file.size("attention.head_count")
    return file.own("attention.key_length", int, computed)


def read_config(file: GgufFile) -> dict[str, Any]:
    """Returns what config.json of the original says. Raises `CheckpointError`: the architecture is
    not here, or has experts."""
    if file.architecture not in _CONFIGS or file.own("expert_count", int, 0):
        raise CheckpointError(
            file.path,
            f"is a GGUF file of architecture {file.architecture!r}, and GGUF is read of "
            f"{', '.join(sorted(_CONFIGS))} without experts",
            "name the original checkpoint with its safetensors files",
        )
    heads = file.size("attention.head_count")
    eos = [file.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot")]
    return {
        "vocab_size": len(file.get("tokenizer.ggml.tokens", list, [])),
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "num_hidden_layers": file.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.own("attention.head_count_kv", int, heads),
        "head_dim": _head_dim(file),
        "max_position_embeddings": file.size("context_length"),
        "rms_norm_eps": file.own("attention.layer_norm_rms_epsilon", float, 1e-6),
        "rope_theta": file.own("rope.freq_base", float, 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.names,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int, -1),
        "eos_token_id": sorted({token for token in eos if token >= 0}),
        "torch_dtype": "float16" if file.is_half else "bfloat16",
        **_CONFIGS[file.architecture](file),
    }


def published(file: GgufFile, name: str, numbers: Numbers) -> tuple[str, Numbers] | None:
    """Returns a tensor as the original has it; None: it says what config.json says.

    Raises:
        CheckpointError: The tensor is unknown.
    """
    if name == _ROPE_FACTORS:
        return None
    is_gemma = file.architecture == "gemma3"
    if is_gemma and name.endswith("norm.weight"):
        numbers = numbers - 1.0
    if name in _TOP:
        return _TOP[name], numbers
    found = _IN_LAYER.fullmatch(name)
    own = (_GEMMA_LAYER if is_gemma else _LAYER).get(found[2]) if found else None
    if found is None or own is None:
        raise CheckpointError(
            file.path,
            f"has a tensor {name}, which {file.architecture} is not known to have",
            "name the original checkpoint with its safetensors files",
        )
    if file.architecture == "llama" and found[2] in ("attn_q", "attn_k"):
        numbers = _halves(numbers, _head_dim(file))
    return f"model.layers.{found[1]}.{own}.{found[3]}", numbers


def _halves(numbers: Numbers, head_dim: int) -> Numbers:
    """Returns the rows of heads with the first of each pair in the first half."""
    rest = numbers.shape[1:]
    pairs = numbers.reshape(-1, head_dim // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(-1, *rest)
