"""OLMo 2 and 3."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec, HeadNorm, NormNames
from engine.models.specs.windowed import WindowedSpec
from engine.rope import Rotary

OLMO_NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_OLMO_THETA = 500_000.0


class Olmo2Spec(DenseSpec, frozen=True, kw_only=True):
    """Norms stand behind attention and feed-forward block, and over queries and keys as a whole."""

    default_eps: ClassVar[float] = 1e-5
    default_head_norm: ClassVar[HeadNorm] = "all"
    norms: ClassVar[NormNames] = OLMO_NORMS


class Olmo3Spec(WindowedSpec, frozen=True, kw_only=True):
    """OLMo 2 with a window on three layers of four, which rotate without the others' scaling."""

    default_eps: ClassVar[float] = 1e-5
    full_layer_every: ClassVar[int] = 4
    default_head_norm: ClassVar[HeadNorm] = "all"
    norms: ClassVar[NormNames] = OLMO_NORMS
    default_theta: ClassVar[float] = _OLMO_THETA
    local_theta: ClassVar[float | None] = _OLMO_THETA

    @classmethod
    def read_window_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary | None:
        plain = msgspec.structs.replace(file, rope_local_base_freq=file.rope_theta)
        return super().read_window_rotary(plain, max_model_len)
