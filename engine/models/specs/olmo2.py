"""OLMo 2."""

from __future__ import annotations

from typing import ClassVar

from engine.models.specs.dense import DenseSpec, HeadNorm, NormNames


class Olmo2Spec(DenseSpec, frozen=True, kw_only=True):
    """Norms stand behind attention and feed-forward block, and over queries and keys as a whole."""

    default_head_norm: ClassVar[HeadNorm] = "all"
    norms: ClassVar[NormNames] = NormNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )
