"""GLM-4, dense (the releases of 2025: GLM-4-0414 and GLM-Z1)."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec, NormNames


class Glm4Spec(DenseSpec, frozen=True, kw_only=True):
    """Norms on both sides of each block; the first half of a head rotates, in interleaved pairs.
    Queries, keys and values have biases, if config.json does not deny it."""

    default_eps: ClassVar[float] = 1.5625e-7
    default_attention_bias: ClassVar[bool] = True
    fused_gate_up: ClassVar[bool] = True
    default_head_dim: ClassVar[int | None] = 128
    default_rotary_part: ClassVar[float | None] = 0.5
    interleaved_rotary: ClassVar[bool] = True
    norms: ClassVar[NormNames] = NormNames(
        before_attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    )

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {"attention_bias": file.attention_bias is not False}


class Glm4vSpec(Glm4Spec, frozen=True, kw_only=True):
    """The text part of GLM-4.1V and GLM-4.6V-Flash: GLM-4 with other defaults."""

    default_eps: ClassVar[float] = 1e-5
    default_head_dim: ClassVar[int | None] = None
