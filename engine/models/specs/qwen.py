"""Qwen 2, 2.5 and 3, dense."""

from __future__ import annotations

from typing import ClassVar

from engine.models.specs.dense import DenseSpec, HeadNorm


class Qwen2Spec(DenseSpec, frozen=True, kw_only=True):
    """Queries, keys and values have a bias."""

    default_attention_bias: ClassVar[bool] = True


class Qwen3Spec(DenseSpec, frozen=True, kw_only=True):
    """Each head of queries and keys is normalised."""

    default_head_norm: ClassVar[HeadNorm] = "each"
    default_head_dim: ClassVar[int | None] = 128


class MiMoSpec(Qwen2Spec, frozen=True, kw_only=True):
    """MiMo-7B: Qwen2 with layers that predict ahead, which are not read."""

    other_weights: ClassVar[tuple[str, ...]] = ("model.mtp_layers.",)
