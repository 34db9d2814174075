"""Describes a family of checkpoints to the tests that compare with transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from tests.engine.models.parity_cases import MAX_LEN, VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
}
LATENT = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Describes a family.

    Attributes:
        changes: What differs from the common sizes.
        older_config: The config is rewritten to the keys that transformers used before version 5.
        norm_center: Gemma's norms hold their distance from 1.
        published: Keys of config.json as its authors publish them, where transformers writes
            others.
        vision, whole: Of a model that takes images: its tower's settings, and its own. `changes`
            are then those of its text part.
        stacks_experts: All experts of a layer are one tensor, as its authors publish them.
        cuts_convolutions: transformers stores convolutions of queries, keys and values cut at other
            places than their authors.
        seed: Of its weights: one whose best two tokens are never nearly equal.
    """

    model: type[PreTrainedModel]
    config: type[PretrainedConfig]
    changes: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "5GB"
    older_config: bool = False
    norm_center: float = 1.0
    published: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None
    whole: dict[str, Any] = field(default_factory=dict)
    stacks_experts: bool = False
    cuts_convolutions: bool = False
    seed: int = 21

    @property
    def architecture(self) -> str:
        """Returns its name in config.json."""
        names: list[str] = self.published.get("architectures", [self.model.__name__])
        return names[0]

    def make_config(self) -> PretrainedConfig:
        if self.vision is not None:
            text = {**SIZES, **self.changes}
            return self.config(text_config=text, vision_config=self.vision, **self.whole)
        return self.config(**{**SIZES, **self.changes})
