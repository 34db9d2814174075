"""The text part of models that take images as well: a decoder that is here, its settings nested in
config.json, its tensors behind a prefix.

    config.json   {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {...}, ...}
    tensors       language_model.model.layers.0 ...     as published
                  model.language_model.layers.0 ...     as transformers 5 writes them
                  language_model.layers.0 ...           as it writes the model without its head
                  vision_tower. ...                     not read

Such a model answers text; a request with an image is refused where requests are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_VISION = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mm_projector.",
    "vision_embedder.", "embed_vision.", "vit_large_projector.", "patch_merge_mlp.",
    "vision_adapter.", "vision_projection.", "vision_encoder.",
)  # fmt: skip
_OTHERS = ("thinker.", "talker.", "code2wav.", "time_series.", "audio_tower.", "embed_audio.")
"""These are the other parts of a model that speaks (Qwen3-Omni), takes audio (Gemma 4), or reads
series of measurements (Intern-S2)."""
_PREFIXES = {
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "language_model.model.blocks.": "model.layers.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.": "model.",
}
_EXPRESSIONS = ("re:", "-:", "+:")
"""Regular expressions begin with one of these; the latter two are of GPTQModel's `dynamic`."""
_BEFORE_HEAD = re.compile(r"language_model\\?\.(?=lm_head)")
_LANGUAGE_MODEL = re.compile(r"(?:model\\?\.)?language_model(?:\\?\.model(?=\W))?")
_QUANTIZATION = ("quantization_config", "compression_config")
_OF_ALL = (*_QUANTIZATION, "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
"""Fields of the whole model that its text part has, too."""


class Wrapper(msgspec.Struct, frozen=True):
    """A model whose text part is here.

    Attributes:
        text: Its architecture, by the `model_type` of `text_config`; "": whatever it says.
        defaults: What `text_config` leaves out, as transformers completes it.
        within: The part of config.json that has `text_config`; "": the whole.
    """

    text: dict[str, str]
    defaults: dict[str, Any] = {}
    within: str = ""


_INTERN = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper(
        {"": "Gemma3ForCausalLM"},
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
    "Gemma3nForConditionalGeneration": Wrapper(
        {"": "Gemma3nForCausalLM"},
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
        },
    ),
    "Gemma4ForConditionalGeneration": Wrapper(
        {"": "Gemma4ForCausalLM"}, {"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        {"": "Gemma4ForCausalLM"},
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
        },
    ),
    "KimiK25ForConditionalGeneration": Wrapper({"": "DeepseekV3ForCausalLM"}),
    "KimiK3ForConditionalGeneration": Wrapper({"": "KimiK3ForCausalLM"}),
    "Glm46VForConditionalGeneration": Wrapper(
        {"": "Glm4vForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM"}
    ),
    "Glm4vForConditionalGeneration": Wrapper({"": "Glm4vForCausalLM"}),
    "Glm4vMoeForConditionalGeneration": Wrapper(
        {"": "Glm4MoeForCausalLM"}, {"attention_bias": True}
    ),
    "InternS1ForConditionalGeneration": Wrapper(_INTERN),
    "InternS2PreviewForConditionalGeneration": Wrapper({"": "Qwen3_5MoeForCausalLM"}),
    "InternVLForConditionalGeneration": Wrapper(_INTERN),
    "Kimi_K25ForConditionalGeneration": Wrapper({"": "DeepseekV3ForCausalLM"}),
    "Mistral3ForConditionalGeneration": Wrapper(
        {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
    ),
    "MiniMaxM3SparseForConditionalGeneration": Wrapper({"": "MiniMaxM3VLForCausalLM"}),
    "MuseGlimmerForConditionalGeneration": Wrapper({"": "MuseGlimmerForCausalLM"}),
    "Qwen2_5_VLForConditionalGeneration": Wrapper({"": "Qwen2ForCausalLM"}),
    "Qwen3OmniMoeForConditionalGeneration": Wrapper(
        {"": "Qwen3MoeForCausalLM"}, {"norm_topk_prob": True}, within="thinker_config"
    ),
    "Qwen3VLForConditionalGeneration": Wrapper({"": "Qwen3ForCausalLM"}),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(
        {"": "Qwen3MoeForCausalLM"}, {"norm_topk_prob": True, "rope_theta": 500_000.0}
    ),
    "Step3p7ForConditionalGeneration": Wrapper({"": "Step3p5ForCausalLM"}),
    "Qwen3_5ForConditionalGeneration": Wrapper({"": "Qwen3_5ForCausalLM"}),
    "Qwen3_5MoeForConditionalGeneration": Wrapper({"": "Qwen3_5MoeForCausalLM"}),
}


def text_architecture(name: str, model_types: list[str]) -> str | None:
    """Returns the architecture of a wrapper's text part.

    Args:
        name: Of the whole model.
        model_types: Its own and, if there is one, that of its `text_config`.

    Returns:
        None: `name` is no wrapper, or its text part is of another kind.
    """
    if (wrapper := WRAPPERS.get(name)) is None:
        return None
    return wrapper.text.get(model_types[-1] if model_types else "", wrapper.text.get(""))


def text_config(name: str, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the text part, as a decoder of its own would have them.

    Args:
        whole: What config.json says. Some releases have no `text_config`, but all in one.
    """
    wrapper = WRAPPERS[name]
    part = whole.get(wrapper.within) or whole
    text = part.get("text_config") or part
    above = {key: whole[key] for key in _OF_ALL if whole.get(key) is not None}
    config = {**wrapper.defaults, **text, **above}
    named = {key: with_own_names(config[key]) for key in _QUANTIZATION if config.get(key)}
    return config | named


def with_own_names(value: Any) -> Any:
    """Returns a part of config.json with modules named as a decoder of its own names them."""
    if isinstance(value, dict):
        return {_own_expression(key): with_own_names(part) for key, part in value.items()}
    if isinstance(value, list):
        return [with_own_names(part) for part in value]
    if isinstance(value, str) and not value.startswith(_EXPRESSIONS):
        return (text_name(value + ".") or value).removesuffix(".")
    return _own_expression(value) if isinstance(value, str) else value


def _own_expression(pattern: str) -> str:
    """Returns a regular expression for names of the whole model as one for the decoder's own."""
    if not pattern.startswith(_EXPRESSIONS):
        return pattern
    return _LANGUAGE_MODEL.sub("model", _BEFORE_HEAD.sub("", pattern))


def text_name(stored: str) -> str | None:
    """Returns what a decoder of its own would call a wrapper's tensor; None: it is not of the text
    part."""
    for prefix, own in _PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    inner = stored.removeprefix("model.")
    return None if inner.startswith((*_VISION, *_OTHERS)) else stored
