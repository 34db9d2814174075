"""Ring and Ling with lightning attention: Ring-linear 2.0, and Ling and Ring 2.5 and 2.6."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from engine.config import KVLayers, ModelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.specs.ahead import BAILING_AHEAD, AheadNames
from engine.models.specs.bailing import BailingMoeV2Spec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.deepseek import DeepseekV3Spec
from engine.models.specs.experts import SHARED_EXPERTS
from engine.models.specs.lightning import (
    ROTATING_PART,
    ROTATING_THETA,
    head_dim_of,
    read_rotating,
    rotating_faults,
)

_NAMES = msgspec.structs.replace(SHARED_EXPERTS, choice_bias="gate.expert_bias")
_TENSORS = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.expert_bias"),
)


class BailingMoeLinearV2Spec(BailingMoeV2Spec, frozen=True, kw_only=True):
    """Ring-linear 2.0: Ring 2.0, most of whose layers keep a state."""

    default_rotary_part: ClassVar[float | None] = ROTATING_PART
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = _TENSORS

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        lightning = read_rotating(file, max_model_len, cls.eps_of(file))
        return {**super().read_more(file, max_model_len), "lightning": lightning}

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        yield from rotating_faults(file)


class BailingMoeV25Spec(DeepseekV3Spec, frozen=True, kw_only=True):
    """Ling and Ring 2.5 and 2.6: a V3 with names of its own, most of whose layers keep a state."""

    ahead: ClassVar[AheadNames] = BAILING_AHEAD
    num_dense: ClassVar[int | None] = 1
    default_scaling: ClassVar[float] = 1.0
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = _TENSORS

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        """Returns config.json with the part of heads that rotates as a number: what latents have
        for that rotates as a whole."""
        said = file.rope.partial_rotary_factor or file.partial_rotary_factor
        rope = file.rope_parameters
        return msgspec.structs.replace(
            file,
            rotary_dim=int(head_dim_of(file) * (ROTATING_PART if said is None else said)),
            partial_rotary_factor=None,
            rope_parameters=rope and msgspec.structs.replace(rope, partial_rotary_factor=None),
            rope_bases=file.rope_bases or ROTATING_THETA,
            scoring_func=file.score_function or file.scoring_func,
        )

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        more = super().read_more(file, max_model_len)
        shared = file.moe_shared_expert_intermediate_size
        experts = msgspec.structs.replace(
            more["experts"],
            names=_NAMES,
            shared_size=shared * (file.num_shared_experts or file.n_shared_experts or 0)
            if shared
            else more["experts"].shared_size,
        )
        lightning = read_rotating(file, max_model_len, cls.eps_of(file))
        return {**more, "experts": experts, "lightning": lightning}

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns the layers with latents, and those with a state in groups of as many."""
        assert self.lightning is not None
        (latents,) = super().kv_layers(model)
        attending = tuple(filter(self.lightning.leaves_attention, latents.layers))
        return self.lightning.kv_layers_beside(model, (replace(latents, layers=attending),))

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        yield from rotating_faults(file)
