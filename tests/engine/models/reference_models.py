"""Tiny random checkpoints of every family, written by transformers, and what it computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.kv_groups.grouped_node import shown_by
from tests.engine.models.family import LATENT, YARN, Family
from tests.engine.models.gpt_oss_family import GPT_OSS_FAMILIES
from tests.engine.models.hybrid_families import HYBRID_FAMILIES
from tests.engine.models.image_families import IMAGE_FAMILIES
from tests.engine.models.kimi_k3_reference import KIMI_K3_FAMILIES
from tests.engine.models.layered_families import LAYERED_FAMILIES
from tests.engine.models.lightning_families import LIGHTNING_FAMILIES
from tests.engine.models.more_families import MORE_FAMILIES
from tests.engine.models.nearby_families import NEARBY_FAMILIES
from tests.engine.models.parity_cases import MAX_LEN, prompts
from tests.engine.models.sparse_families import SPARSE_FAMILIES

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PAIR_FACTORS = [1.0, 1.1, 1.3, 1.7, 2.2, 2.8, 3.5, 4.3]
"""One for each pair of a head. transformers takes the short ones for a sequence within the
original context, ours the long ones where any could outgrow it; so both are alike here. No sequence
crosses the border: some releases of transformers then compute their cache anew, others do not."""
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": _PAIR_FACTORS,
    "long_factor": _PAIR_FACTORS,
}
_PHI3 = {"pad_token_id": 0, "eos_token_id": 0}


_LOCAL_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention"] * 2

FAMILIES = {
    **GPT_OSS_FAMILIES,
    **MORE_FAMILIES,
    **IMAGE_FAMILIES,
    **HYBRID_FAMILIES,
    **LIGHTNING_FAMILIES,
    **KIMI_K3_FAMILIES,
    **NEARBY_FAMILIES,
    **LAYERED_FAMILIES,
    **SPARSE_FAMILIES,
    "deepseek_v2": Family(
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            **LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3_yarn": Family(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 20,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gemma2": Family(
        Gemma2ForCausalLM,
        Gemma2Config,
        {"head_dim": 24, "sliding_window": 19, "query_pre_attn_scalar": 20, "num_hidden_layers": 4},
        norm_center=0.0,
    ),
    "gemma3": Family(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 17,
            "query_pre_attn_scalar": 12,
            "num_hidden_layers": 6,
            "layer_types": _LOCAL_AND_FULL,
        },
        norm_center=0.0,
    ),
    "glm4": Family(
        Glm4ForCausalLM, Glm4Config, {"head_dim": 24, "eos_token_id": 0, "pad_token_id": 0}
    ),
    "olmo2": Family(Olmo2ForCausalLM, Olmo2Config, {"eos_token_id": 0, "pad_token_id": 0}),
    "llama": Family(LlamaForCausalLM, LlamaConfig),
    "llama3_rope_tied_sharded": Family(
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
        shard_size="60KB",
    ),
    "llama3_rope_older_config": Family(
        LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}, older_config=True
    ),
    "llama_one_kv_head": Family(LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama_linear_rope": Family(
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "mixtral": Family(
        MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "glm4_moe": Family(
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 24,
        },
    ),
    "minimax_m2": Family(
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 24,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen2_moe": Family(
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_sharded": Family(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 24,
            "norm_topk_prob": True,
        },
        shard_size="60KB",
    ),
    "mistral": Family(MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "mistral_window": Family(MistralForCausalLM, MistralConfig, {"sliding_window": 21}),
    "phi3": Family(Phi3ForCausalLM, Phi3Config, {**_PHI3, "sliding_window": MAX_LEN}),
    "phi3_part_rotates": Family(
        Phi3ForCausalLM,
        Phi3Config,
        {**_PHI3, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3_longrope_tied": Family(
        Phi3ForCausalLM,
        Phi3Config,
        {
            **_PHI3,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 150,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_yarn": Family(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24, "rope_parameters": YARN}),
    "qwen2": Family(Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": {"rope_theta": 1e6}}),
    "qwen3_tied": Family(
        Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24, "tie_word_embeddings": True}
    ),
}


def save_checkpoint(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Saves random weights everywhere (also biases and norms), large enough that attention
    matters.
    """
    torch.manual_seed(family.seed)
    model = family.model(family.make_config())
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            vector = parameter.dim() == 1
            parameter.copy_(family.norm_center + 0.2 * noise if vector else 0.15 * noise)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(2 * torch.randn(parameter.shape))
            if name.endswith("A_log"):
                # Some heads forget at once, some remember whole prompts.
                parameter.copy_(torch.linspace(-5.0, 0.5, parameter.numel()).view_as(parameter))
            if name.endswith("dt_bias"):
                parameter.copy_(torch.randn(parameter.shape) - 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape))
            if name.endswith("tid2eid"):
                scores = torch.rand(len(buffer), model.config.n_routed_experts)
                buffer.copy_(scores.argsort(1)[:, : buffer.shape[1]])
            if name.endswith("layer_scalar"):
                buffer.copy_(0.75 + 0.5 * torch.rand(buffer.shape))
    model.to(dtype).save_pretrained(folder, max_shard_size=family.shard_size)
    if family.stacks_experts:
        _stack_experts(folder / "model.safetensors")
    if family.cuts_convolutions:
        _cut_convolutions(folder / "model.safetensors")
    if family.older_config:
        _to_older_config(folder / "config.json")
    if family.published:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | family.published))


def _stack_experts(path: Path) -> None:
    tensors = load_file(path)
    layers = {name.partition("0.gate_proj")[0] for name in tensors if ".experts.0.gate" in name}
    for layer in layers:
        count = sum(name.startswith(layer) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}{i}.{name}_proj.weight") for i in range(count)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{layer}gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{layer}down_proj"] = down
    save_file(tensors, path, metadata={"format": "pt"})


def _cut_convolutions(path: Path) -> None:
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        kinds = [name.replace("q_conv1d", f"{kind}_conv1d") for kind in "qkv"]
        widths = [len(tensors[one.replace("conv1d", "proj")]) for one in kinds]
        parts = torch.cat([tensors[one] for one in kinds]).split(widths)
        tensors |= {one: part.clone() for one, part in zip(kinds, parts, strict=True)}
    save_file(tensors, path, metadata={"format": "pt"})


def _to_older_config(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family = next(f for f in FAMILIES.values() if f.architecture == _architecture(folder))
    config = family.config.from_pretrained(folder)
    # Kimi K2 has a name of its own for what transformers knows as DeepSeek V3.
    config.model_type = family.config.model_type
    model = family.model.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    if isinstance(config, GptOssConfig):
        # transformers 5.17 has 7 here, whatever config.json says.
        for layer in model.model.layers:
            layer.mlp.experts.limit = config.swiglu_limit
    return model


@cache
def shared_reference(folder: Path) -> PreTrainedModel:
    """Returns `reference(folder)`, loaded once for all tests that leave it as it is."""
    return reference(folder)


def _architecture(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["architectures"][0])


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Returns logits [len(prompt), VOCAB]."""
    return model(torch.tensor([prompt])).logits[0]


@torch.no_grad()
@cache
def expected_logits(folder: Path) -> list[torch.Tensor]:
    """Returns `reference_logits` of every prompt of `prompts()`."""
    model = shared_reference(folder)
    return [reference_logits(model, prompt) for prompt in prompts()]


class GreedyAnswers:
    """Knows what transformers answers, and remembers it. It computes no more than was asked for: a
    token takes it two to ten milliseconds, and so does a guess of a whole answer, which one pass
    shows to be right, or how far it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < count and guess:
            logits = reference_logits(self._model, [*prompt, *guess[:-1]])[len(prompt) - 1 :]
            known = shown_by(logits.argmax(-1).tolist(), guess)
        if left := max(0, count - len(known)):
            known = known + reference_greedy(self._model, [*prompt, *known], left)[0]
        self._known[tuple(prompt)] = known
        return known[:count]


def reference_greedy(
    model: PreTrainedModel, prompt: list[int], count: int
) -> tuple[list[int], float]:
    """Returns `count` tokens, and the smallest lead that a chosen token had over the next best."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    lead = float((best[:, 0] - best[:, 1]).min())
    return output.sequences[0, len(prompt) :].tolist(), lead
