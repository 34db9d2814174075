"""Hy3."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec, HeadNorm
from engine.models.specs.experts import ExpertNames, sigmoid_experts

_NAMES = ExpertNames(router="router.gate.weight", choice_bias="expert_bias", shared="shared_mlp")


class HYV3Spec(DenseSpec, frozen=True, kw_only=True):
    """Experts chosen by sigmoid scores and a bias, beside a shared one and behind a dense layer;
    norms of each head."""

    default_eps: ClassVar[float] = 1e-5
    default_head_norm: ClassVar[HeadNorm] = "each"
    default_head_dim: ClassVar[int | None] = 128
    default_theta: ClassVar[float] = 11_158_840.0
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.mlp\.gate\.weight$", ".mlp.router.gate.weight"),
        (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
    )
    num_dense: ClassVar[int | None] = 1

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        scaling = 2.826 if file.router_scaling_factor is None else file.router_scaling_factor
        experts = sigmoid_experts(file, num_dense=1, scaling=scaling, num_shared=1)
        return {"experts": msgspec.structs.replace(experts, names=_NAMES)}
