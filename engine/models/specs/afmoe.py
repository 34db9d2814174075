"""Arcee's Trinity (AFMoE)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import HeadNorm, NormNames, OutputGate
from engine.models.specs.experts import SHARED_EXPERTS, sigmoid_experts
from engine.models.specs.windowed import WindowedSpec

_NAMES = msgspec.structs.replace(
    SHARED_EXPERTS, router="router.gate.weight", choice_bias="expert_bias"
)


class AfmoeSpec(WindowedSpec, frozen=True, kw_only=True):
    """Gated attention with norms of each head, four norms a layer, windows on three layers of four
    and no rotation on the fourth; experts chosen as in GLM-4.5, behind a few dense layers."""

    default_eps: ClassVar[float] = 1e-5
    default_head_dim: ClassVar[int | None] = 128
    default_head_norm: ClassVar[HeadNorm] = "each"
    default_window: ClassVar[int] = 1024
    full_layer_every: ClassVar[int] = 4
    num_dense: ClassVar[int | None] = 1
    default_output_gate: ClassVar[OutputGate] = "apart"
    norms: ClassVar[NormNames] = NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_mlp_layernorm",
        after_mlp="post_mlp_layernorm",
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        if file.num_dense_layers is None:
            return file
        return msgspec.structs.replace(file, first_k_dense_replace=file.num_dense_layers)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        every = file.global_attn_every_n_layers or cls.full_layer_every
        named = msgspec.structs.replace(file, sliding_window_pattern=every)
        more = super().read_more(named, max_model_len)
        local = set(more["window_layers"])
        experts = sigmoid_experts(
            file,
            num_dense=1,
            scaling=1.0 if file.route_scale is None else file.route_scale,
            renormalises=file.route_norm is not False,
        )
        return {
            **more,
            "unrotated_layers": tuple(i for i in range(file.num_hidden_layers) if i not in local),
            "stream_scale": file.hidden_size**0.5 if file.mup_enabled else 1.0,
            "experts": msgspec.structs.replace(experts, names=_NAMES),
        }

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if (file.score_func or "sigmoid") != "sigmoid":
            yield UnsupportedField("score_func", repr(file.score_func))
