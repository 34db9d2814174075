"""Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.experts import ExpertSpec, num_experts_of, number_of
from engine.models.specs.qwen import Qwen2Spec, Qwen3Spec


def qwen_experts(
    file: ConfigFile, shared_size: int, *, renormalises_by_default: bool = False
) -> ExpertSpec:
    """Returns the experts of every layer, of every other one and so on, as config.json says."""
    without = set(file.mlp_only_layers or ())
    step = file.decoder_sparse_step
    return ExpertSpec(
        count=num_experts_of(file),
        top_k=number_of(file, "num_experts_per_tok"),
        intermediate_size=number_of(file, "moe_intermediate_size"),
        renormalise=(
            renormalises_by_default if file.norm_topk_prob is None else file.norm_topk_prob
        ),
        dense_layers=tuple(
            i for i in range(file.num_hidden_layers) if i in without or (i + 1) % step
        ),
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )


class Qwen2MoeSpec(Qwen2Spec, frozen=True, kw_only=True):
    """Qwen 1.5 and 2 with experts, and one that every token goes to by its own gate."""

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.qkv_bias is False:
            raise UnsupportedField("qkv_bias", "projections without the biases of its family")
        return {"experts": qwen_experts(file, number_of(file, "shared_expert_intermediate_size"))}


class Qwen3MoeSpec(Qwen3Spec, frozen=True, kw_only=True):
    """Qwen 3 with experts."""

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {"experts": qwen_experts(file, shared_size=0)}
