"""GLM-4.5 and 4.6."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import sigmoid_experts


class Glm4MoeSpec(DenseSpec, frozen=True, kw_only=True):
    """GLM-4.5 and 4.6: experts chosen by sigmoid scores and a bias, behind a few dense layers."""

    default_eps: ClassVar[float] = 1e-5
    default_attention_bias: ClassVar[bool] = True
    default_rotary_part: ClassVar[float | None] = 0.5

    num_dense: ClassVar[int] = 1

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {
            "attention_bias": bool(file.attention_bias),
            "head_norm": "each" if file.use_qk_norm else "none",
            "experts": sigmoid_experts(file, num_dense=cls.num_dense),
        }
