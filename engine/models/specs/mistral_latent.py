"""Mistral Small 4: latent attention, experts, and scores that grow with the position."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.deepseek import DeepseekV2Spec
from engine.models.specs.experts import ExpertSpec, number_of
from engine.models.specs.rope import read_query_scale


class Mistral4Spec(DeepseekV2Spec, frozen=True, kw_only=True):
    """DeepSeek V2 whose experts' weights are divided by their sum."""

    num_dense: ClassVar[int | None] = 0

    @classmethod
    def from_config(cls, file: ConfigFile, max_model_len: int) -> Self:
        return super().from_config(_of_rotating_part(file), max_model_len)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        scale = read_query_scale(file, max_model_len)
        return {**super().read_more(file, max_model_len), "query_scale": scale}

    @classmethod
    def read_experts(cls, file: ConfigFile) -> ExpertSpec:
        if (file.n_group or 1) > 1:
            raise UnsupportedField("n_group", "groups of experts")
        experts = super().read_experts(file)
        return msgspec.structs.replace(experts, renormalise=file.norm_topk_prob is not False)


def _of_rotating_part(file: ConfigFile) -> ConfigFile:
    """Returns config.json without the part of a head that rotates, which transformers writes here:
    the sizes say it already. Raises `UnsupportedField` where they differ."""
    nope, rope = number_of(file, "qk_nope_head_dim"), number_of(file, "qk_rope_head_dim")
    said = file.rope.partial_rotary_factor or file.partial_rotary_factor
    if said is not None and round(said * (nope + rope)) != rope:
        raise UnsupportedField("partial_rotary_factor", f"{said} of a head of {nope} and {rope}")
    fields = msgspec.structs.replace(file.rope, partial_rotary_factor=None)
    return msgspec.structs.replace(file, rope_parameters=fields, partial_rotary_factor=None)
