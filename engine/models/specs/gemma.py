"""Gemma 2 and 3, text."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import Activation, DenseSpec, HeadNorm, NormNames
from engine.models.specs.rope import read_rotary
from engine.rope import Rotary

_WINDOW = 4096
_SCALAR = 256.0
"""Defaults of transformers, for a config.json that says nothing."""
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0


class GemmaSpec(DenseSpec, frozen=True, kw_only=True):
    """Holds what both releases share: norms on both sides of each block, whose weights are stored
    as their distance from 1, and windows on some layers."""

    default_head_dim: ClassVar[int | None] = 256
    default_tied: ClassVar[bool] = True
    activation: ClassVar[Activation] = "gelu_tanh"
    norm_offset: ClassVar[float] = 1.0
    scales_embedding: ClassVar[bool] = True
    norms: ClassVar[NormNames] = NormNames(
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )
    full_layer_every: ClassVar[int]
    """Says which layers see everything where config.json does not: one of so many, the last."""
    default_attention_softcap: ClassVar[float] = 0.0
    default_final_softcap: ClassVar[float] = 0.0

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        return _WINDOW if file.sliding_window is msgspec.UNSET else file.sliding_window

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.use_bidirectional_attention:
            raise UnsupportedField("use_bidirectional_attention", "attention to later tokens")
        every = file.sliding_window_pattern or cls.full_layer_every
        kinds = file.layer_types or [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention"
            for i in range(file.num_hidden_layers)
        ]
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise UnsupportedField("layer_types", ", ".join(sorted(unknown)))
        scalar = _SCALAR if file.query_pre_attn_scalar is None else file.query_pre_attn_scalar
        return {
            "window_layers": tuple(
                i for i, kind in enumerate(kinds) if kind == "sliding_attention"
            ),
            "attention_scale": scalar**-0.5,
            "attention_softcap": _cap(file.attn_logit_softcapping, cls.default_attention_softcap),
            "final_softcap": _cap(file.final_logit_softcapping, cls.default_final_softcap),
        }


def _cap(said: float | msgspec.UnsetType | None, default: float) -> float:
    return default if said is msgspec.UNSET else said or 0.0


class Gemma2Spec(GemmaSpec, frozen=True, kw_only=True):
    """Scores and logits are capped, and every other layer has a window."""

    full_layer_every: ClassVar[int] = 2
    default_attention_softcap: ClassVar[float] = 50.0
    default_final_softcap: ClassVar[float] = 30.0


class Gemma3Spec(GemmaSpec, frozen=True, kw_only=True):
    """Each head of queries and keys is normalised, and layers with a window rotate faster."""

    full_layer_every: ClassVar[int] = 6
    default_head_norm: ClassVar[HeadNorm] = "each"

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        theta = file.rope_theta or _GLOBAL_THETA
        rope = file.rope.full_attention or file.rope
        return read_rotary(file, cls.head_dim_of(file), max_model_len, rope=rope, theta=theta)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        head_dim = cls.head_dim_of(file)
        local = file.rope.sliding_attention
        theta = file.rope_local_base_freq or _LOCAL_THETA
        rotary = (
            Rotary(theta=theta, dim=head_dim)
            if local is None
            else read_rotary(file, head_dim, max_model_len, rope=local, theta=theta)
        )
        return {**super().read_more(file, max_model_len), "window_rotary": rotary}
