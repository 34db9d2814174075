"""GLM-4.5 and 4.6, and Solar Open."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import sigmoid_experts


class Glm4MoeSpec(DenseSpec, frozen=True, kw_only=True):
    """GLM-4.5 and 4.6: experts chosen by sigmoid scores and a bias, behind a few dense layers."""

    default_eps: ClassVar[float] = 1e-5
    default_attention_bias: ClassVar[bool] = True
    default_rotary_part: ClassVar[float | None] = 0.5

    num_dense: ClassVar[int | None] = 1

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {
            "attention_bias": bool(file.attention_bias),
            "head_norm": "each" if file.use_qk_norm else "none",
            "experts": sigmoid_experts(file, cls.num_dense or 0),
        }


class SolarOpenSpec(Glm4MoeSpec, frozen=True, kw_only=True):
    """Solar Open: heads rotate as a whole, and all layers have experts."""

    default_theta: ClassVar[float] = 1_000_000.0
    default_rotary_part: ClassVar[float | None] = 1.0
    default_head_dim: ClassVar[int | None] = 128
    num_dense: ClassVar[int | None] = 0
