"""Mistral's models in its own form of a checkpoint; see `engine.models.config.mistral_params`.

Pairs that rotate lie behind each other, as Meta had them.
"""

from __future__ import annotations

from typing import ClassVar

from engine.models.specs.mistral import Ministral3Spec
from engine.models.specs.mistral_latent import Mistral4Spec

_LAYER = r"^(layers\.\d+\.)"
_OF_LAYERS = {
    r"attention_norm\.": "input_layernorm.",
    r"ffn_norm\.": "post_attention_layernorm.",
    r"attention\.": "self_attn.",
    r"feed_forward\.": "mlp.",
    r"gate\.": "mlp.gate.",
    r"shared_experts\.": "mlp.shared_experts.",
    r"experts\.": "mlp.experts.",
}
_OF_MODULES = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "q_a_norm": "q_a_layernorm",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
}
_NAMES = (
    *((_LAYER + own, rf"model.\1{name}") for own, name in _OF_LAYERS.items()),
    *((rf"^(model\.layers\..*)\.{own}\.", rf"\1.{name}.") for own, name in _OF_MODULES.items()),
    (r"\.qscale_weight$", ".weight_scale"),
    (r"\.qscale_act$", ".input_scale"),
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
)
_TOWER = (
    "vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.",
)  # fmt: skip


class MistralNativeSpec(Ministral3Spec, frozen=True, kw_only=True):
    """Mistral and Ministral, dense."""

    interleaved_rotary: ClassVar[bool] = True
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = _NAMES
    other_weights: ClassVar[tuple[str, ...]] = _TOWER


class MistralLarge3Spec(Mistral4Spec, frozen=True, kw_only=True):
    """Mistral Large 3, which is no other kind of model than Mistral Small 4."""

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = _NAMES
    other_weights: ClassVar[tuple[str, ...]] = _TOWER
