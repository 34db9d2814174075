"""Ling and Ring 2.0 (Bailing), and Sarvam, which has their names of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import SHARED_EXPERTS, sigmoid_experts

_NAMES = msgspec.structs.replace(SHARED_EXPERTS, choice_bias="gate.expert_bias")


class BailingMoeV2Spec(DenseSpec, frozen=True, kw_only=True):
    """GLM-4.5 with names of its own, and queries, keys and values as one tensor."""

    fused_qkv: ClassVar[bool] = True
    default_theta: ClassVar[float] = 600_000.0
    default_rotary_part: ClassVar[float | None] = 1.0
    num_dense: ClassVar[int | None] = 1
    default_scaling: ClassVar[float] = 1.0
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
        (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    )

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        experts = sigmoid_experts(file, num_dense=1, scaling=cls.default_scaling)
        return {
            "attention_bias": bool(file.use_qkv_bias),
            "head_norm": "none" if file.use_qk_norm is False else "each",
            "experts": msgspec.structs.replace(experts, names=_NAMES),
        }

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if (file.score_function or "sigmoid") != "sigmoid":
            yield UnsupportedField("score_function", repr(file.score_function))
        if file.use_bias:
            yield UnsupportedField("use_bias", "biases beyond those of its family")


class SarvamMoeSpec(BailingMoeV2Spec, frozen=True, kw_only=True):
    """Sarvam-30B."""

    default_theta: ClassVar[float] = 8_000_000.0
    default_scaling: ClassVar[float] = 2.5
