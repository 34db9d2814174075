"""Reflection's Beam."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import of_each_layer
from engine.models.specs.dense import HeadNorm, NormNames, OutputGate
from engine.models.specs.experts import sigmoid_experts
from engine.models.specs.windowed import WindowedSpec
from engine.rope import QueryScale

_GROUPS, _TOP_GROUPS = 8, 4
"""transformers takes these where config.json says nothing, and the next ones always."""
_SCALE = QueryScale(length=2048, power=0.1)


class BeamSpec(WindowedSpec, frozen=True, kw_only=True):
    """Windows on five layers of six; the others do not rotate, and their scores grow with the
    position. Each number that a head attends to has a gate, and each head a bias of its gates. Four
    norms a layer; experts as in GLM-4.5, without a shared one.

    Each sum of the stream is divided by the root of how many there were. Held undivided, the stream
    is a plain sum, and norms undo what differs.
    """

    default_head_dim: ClassVar[int | None] = 128
    default_head_norm: ClassVar[HeadNorm] = "each"
    default_output_gate: ClassVar[OutputGate] = "apart"
    gate_bias: ClassVar[bool] = True
    scales_unrotated: ClassVar[bool] = True
    default_window: ClassVar[int] = 512
    full_layer_every: ClassVar[int] = 6
    local_theta: ClassVar[float | None] = 10_000.0
    num_dense: ClassVar[int | None] = 3
    norms: ClassVar[NormNames] = NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        kinds = of_each_layer(file, "layer_types") or [
            "sliding_attention" if (i + 1) % cls.full_layer_every else "full_attention"
            for i in range(file.num_hidden_layers - 1)
        ] + ["full_attention"]
        groups = _GROUPS if file.n_group is None else file.n_group
        best = _TOP_GROUPS if file.topk_group is None else file.topk_group
        return msgspec.structs.replace(file, layer_types=kinds, n_group=groups, topk_group=best)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        more = super().read_more(file, max_model_len)
        local, cap = set(more["window_layers"]), file.final_logit_softcapping
        return {
            **more,
            "unrotated_layers": tuple(i for i in range(file.num_hidden_layers) if i not in local),
            "query_scale": _SCALE,
            "final_softcap": 30.0 if cap is msgspec.UNSET else cap or 0.0,
            "experts": sigmoid_experts(file, 3, 2.5),
        }
