"""Muse Glimmer, text."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.dense import HeadNorm, NormNames, OutputGate
from engine.models.specs.windowed import WindowedSpec

_SCALE, _MULTIPLIER, _SOFTCAP, _POST_EPS = 3.87, 0.19611613513818404, 20.0, 1e-8
"""transformers takes these where config.json says nothing."""


class MuseGlimmerSpec(WindowedSpec, frozen=True, kw_only=True):
    """Heads and embeddings are normalised without weights, and each number that a head attends to
    has a gate. Windows on three layers of four; the fourth sees everything and does not rotate.
    Four norms a layer, stored as their distance from 1, unlike the last of all."""

    default_eps: ClassVar[float] = 1e-5
    default_head_dim: ClassVar[int | None] = 128
    default_head_norm: ClassVar[HeadNorm] = "each"
    default_output_gate: ClassVar[OutputGate] = "apart"
    default_window: ClassVar[int] = 2048
    full_layer_every: ClassVar[int] = 4
    norm_offset: ClassVar[float] = 1.0
    last_norm_offset: ClassVar[float | None] = 0.0
    has_plain_head_norms: ClassVar[bool] = True
    norms_embedding: ClassVar[bool] = True
    norms: ClassVar[NormNames] = NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        count = file.num_hidden_layers
        kinds = of_each_layer(file, "layer_types") or [
            "sliding_attention" if (count - 1 - i) % cls.full_layer_every else "full_attention"
            for i in range(count)
        ]
        return msgspec.structs.replace(file, layer_types=kinds)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        count, cap = file.num_hidden_layers, file.final_logit_softcapping
        bases = of_each_layer(file, "layer_rope_theta") or [
            float((count - 1 - i) % cls.full_layer_every) for i in range(count)
        ]
        if len({base for base in bases if base}) > 1 and file.layer_rope_theta:
            raise UnsupportedField("layer_rope_theta", "layers that rotate by several bases")
        scale = _SCALE if file.qk_scale_factor is None else file.qk_scale_factor
        multiplier = file.output_multiplier
        return {
            **super().read_more(file, max_model_len),
            "unrotated_layers": tuple(i for i, base in enumerate(bases) if not base),
            "attention_scale": scale * cls.head_dim_of(file) ** -0.5,
            "logit_scale": _MULTIPLIER if multiplier is None else multiplier,
            "final_softcap": _SOFTCAP if cap is msgspec.UNSET else cap or 0.0,
            "after_eps": _POST_EPS if file.post_norm_eps is None else file.post_norm_eps,
        }
