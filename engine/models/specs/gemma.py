"""Gemma 2 and 3, text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import Activation, HeadNorm, NormNames
from engine.models.specs.windowed import WindowedSpec

_SCALAR = 256.0
"""transformers takes it where config.json says nothing."""


class GemmaSpec(WindowedSpec, frozen=True, kw_only=True):
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
    default_attention_softcap: ClassVar[float] = 0.0
    default_final_softcap: ClassVar[float] = 0.0

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.use_bidirectional_attention:
            raise UnsupportedField("use_bidirectional_attention", "attention to later tokens")
        scalar = _SCALAR if file.query_pre_attn_scalar is None else file.query_pre_attn_scalar
        return {
            **super().read_more(file, max_model_len),
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
    default_theta: ClassVar[float] = 1_000_000.0
    local_theta: ClassVar[float | None] = 10_000.0


def sharing_faults(
    kinds: list[str], num_layers: int, num_shared: int
) -> Iterator[UnsupportedField]:
    """Lists what is wrong with the last layers' reading of keys and values of the last before them
    that is of their kind."""
    own = set(kinds[: max(0, num_layers - num_shared)])
    if num_shared < 0 or (num_shared and own != set(kinds)):
        yield UnsupportedField(
            "num_kv_shared_layers", f"{num_shared} layers that share keys and values of no other"
        )
