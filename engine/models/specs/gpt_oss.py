"""gpt-oss."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile, RopeFields
from engine.models.specs.base import UnsupportedField
from engine.models.specs.experts import (
    ExpertNames,
    ExpertSpec,
    gate_limit_of,
    num_experts_of,
    number_of,
)
from engine.models.specs.rope import read_rotary
from engine.models.specs.windowed import WindowedSpec
from engine.rope import Rotary

_YARN = RopeFields(
    rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
)
"""transformers takes it where config.json says nothing."""
_GPT_OSS_NAMES = ExpertNames(router="router.weight", router_bias="router.bias")


class GptOssSpec(WindowedSpec, frozen=True, kw_only=True):
    """Attention sinks, windows on every other layer, biases everywhere, and experts whose gate is
    clamped and whose tensors are those of all experts of a layer."""

    default_eps: ClassVar[float] = 1e-5
    default_attention_bias: ClassVar[bool] = True
    default_head_dim: ClassVar[int | None] = 64
    default_theta: ClassVar[float] = 150_000.0
    default_window: ClassVar[int] = 128
    full_layer_every: ClassVar[int] = 2

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        rope = file.rope_parameters or file.rope_scaling or _YARN
        theta = file.rope_theta or cls.default_theta
        return read_rotary(file, cls.head_dim_of(file), max_model_len, rope=rope, theta=theta)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if min(gate_limit_of(file), file.swiglu_alpha) <= 0:
            raise UnsupportedField("swiglu_limit", "a gate without a limit or a slope")
        has_bias = file.attention_bias is not False
        return {
            **super().read_more(file, max_model_len),
            "attention_bias": has_bias,
            "output_bias": has_bias,
            "sink_layers": tuple(range(file.num_hidden_layers)),
            "experts": ExpertSpec(
                count=num_experts_of(file),
                top_k=number_of(file, "num_experts_per_tok"),
                intermediate_size=file.intermediate_size,
                renormalise=True,
                router_bias=True,
                biases=True,
                stacked=True,
                gate_limit=gate_limit_of(file),
                gate_alpha=file.swiglu_alpha,
                names=_GPT_OSS_NAMES,
            ),
        }
