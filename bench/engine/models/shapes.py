"""Shapes of models, and engines for them with random weights (`engine.speed.offline_engine`)."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from engine.config import (
    AttentionBackendName,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVCacheDtype,
    ParallelConfig,
    SchedulerConfig,
)
from engine.fast_paths import FastPath
from engine.models.checkpoint import load_model_config
from engine.models.kv_scale_files import choose_kv_scales

SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500_000.0,
    },
    "llama-3.1-70b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500_000.0,
    },
    # What one of four ranks has of it; what the four take beyond this is sums and waiting.
    "llama-3.1-70b-rank-of-4": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32_064,
        "hidden_size": 8192,
        "intermediate_size": 7168,
        "num_hidden_layers": 80,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1_000_000.0,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    # Three layers of 58 with experts, which take 11 GB each in FP8.
    "deepseek-v3.2-6-layers": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 6,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    # A dense layer, and three of the 57 that choose blocks, whose experts take 14 GB each in bf16.
    "minimax-m3-4-layers": {
        "architectures": ["MiniMaxM3VLForCausalLM"],
        "vocab_size": 200_064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12_288,
        "shared_intermediate_size": 3072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rotary_dim": 64,
        "rope_theta": 5_000_000.0,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 4,
            "sparse_index_dim": 128,
            "sparse_block_size": 128,
            "sparse_topk_blocks": 16,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    },
}
QUANTIZATIONS: dict[str, dict[str, object]] = {
    "fp8": {},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8, "type": "int", "strategy": "token", "dynamic": True,
                },
            }
        },
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "modelopt", "quant_algo": "MXFP4"},
    "int8-weights": {
        "quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True, "desc_act": False,
    },
}  # fmt: skip
"""Holds what config.json says of quantised weights; `fp8`: nothing, they are as they are loaded."""
_GPT_OSS: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "attention_bias": True,
}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
SHAPES["gpt-oss-20b-bf16"] = {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}
SHAPES["gpt-oss-20b"] = {**SHAPES["gpt-oss-20b-bf16"], "quantization_config": _MXFP4}
SHAPES["gpt-oss-120b"] = {
    **SHAPES["gpt-oss-20b"],
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
# The first layer and six others, of 48: one GPU holds no more.
SHAPES["mimo-v2-flash-7-layers"] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "vocab_size": 152_576,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 7,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "rope_theta": 5_000_000.0,
}
_GEMMA_4: dict[str, object] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
SHAPES["gemma-4-26b-a4b"] = {
    **_GEMMA_4,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
# The second layer sees everything, and the last two keep nothing of their own.
SHAPES["gemma-4-e4b-4-layers"] = {
    **_GEMMA_4,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "sliding_window": 512,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 256,
}
SHAPES["tiny"] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHAPES["tiny-experts"] = {
    **SHAPES["qwen3-30b-a3b"],
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


def config_json(shape: str) -> dict[str, object]:
    """Returns the config.json of a shape."""
    return {**_COMMON, **SHAPES[shape]}


def shape_config(
    shape: str,
    *,
    device: str = "cuda",
    num_layers: int | None = None,
    max_model_len: int = 9216,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    block_size: int = 128,
    capture_sizes: tuple[int, ...] = (),
    enforce_eager: bool = False,
    attention_backend: AttentionBackendName = "auto",
    disabled_fast_paths: tuple[FastPath, ...] = (),
    deterministic: bool = False,
    tensor_parallel_size: int = 1,
    all_reduce: str = "auto",
    quantization: str = "",
    kv_cache_dtype: KVCacheDtype = "auto",
) -> EngineConfig:
    """Returns an engine with random weights, of `QUANTIZATIONS` or plain; the prefix cache is
    off. `num_layers`: None for all of them."""
    published = QUANTIZATIONS.get(quantization)
    changed: dict[str, object] = {"quantization_config": published} if published else {}
    if num_layers is not None:
        changed["num_hidden_layers"] = num_layers
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(config_json(shape) | changed)
        (Path(folder) / "config.json").write_text(text)
        model = load_model_config(
            folder,
            max_model_len=max_model_len,
            load_format="dummy",
            served_model_name=shape,
            quantization="fp8" if quantization == "fp8" else None,
        )
    return EngineConfig(
        engine_id=f"bench-{random.getrandbits(32):08x}",
        epoch=1,
        model=model,
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=False,
            kv_scales=choose_kv_scales(model, kv_cache_dtype),
        ),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size, all_reduce=all_reduce),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=device == "cuda",
        ),
        device=DeviceConfig(
            device="cuda" if device == "cuda" else "cpu",
            enforce_eager=enforce_eager,
            cudagraph_capture_sizes=capture_sizes,
            attention_backend=attention_backend,
            disabled_fast_paths=disabled_fast_paths,
            deterministic=deterministic,
        ),
    )
