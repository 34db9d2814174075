"""MiniMax-M2."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec, HeadNorm
from engine.models.specs.experts import ExpertSpec, num_experts_of, number_of
from engine.models.specs.mixtral import MIXTRAL_NAMES
from engine.models.specs.rope import read_rotary
from engine.rope import Rotary

_MINIMAX_THETA = 5_000_000.0


class MiniMaxM2Spec(DenseSpec, frozen=True, kw_only=True):
    """MiniMax-M2: experts chosen by sigmoid scores and a bias; queries and keys are normalised as a
    whole, and a part of each head rotates."""

    default_head_norm: ClassVar[HeadNorm] = "all"
    default_rotary_part: ClassVar[float | None] = 1.0
    default_head_dim: ClassVar[int | None] = 128

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        head_dim = cls.head_dim_of(file)
        part = (file.rotary_dim or head_dim) / head_dim
        theta = file.rope_theta or _MINIMAX_THETA
        return read_rotary(file, head_dim, max_model_len, partial=part, theta=theta)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {
            "experts": ExpertSpec(
                count=num_experts_of(file),
                top_k=number_of(file, "num_experts_per_tok"),
                intermediate_size=file.intermediate_size,
                renormalise=True,
                sigmoid=True,
                choice_bias=True,
                names=msgspec.structs.replace(MIXTRAL_NAMES, choice_bias="e_score_correction_bias"),
            )
        }
