"""Mixtral, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertNames, ExpertSpec
from engine.models.specs.qwen import Qwen2Spec, Qwen3Spec

_MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def _number(file: ConfigFile, name: str) -> int:
    value: int | None = getattr(file, name)
    if value is None or value < 1:
        raise UnsupportedField(name, "a mixture of experts without it")
    return value


def _num_experts(file: ConfigFile) -> int:
    """Returns the number of experts; releases of transformers differ in the name."""
    count = file.num_experts or file.num_local_experts
    if count is None or count < _number(file, "num_experts_per_tok"):
        raise UnsupportedField("num_experts", f"{count} experts")
    return count


class MixtralSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama with eight experts a layer, in place of the feed-forward block."""

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        super().read_window(file)
        return None if file.sliding_window is msgspec.UNSET else file.sliding_window

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {
            "experts": ExpertSpec(
                count=_num_experts(file),
                top_k=_number(file, "num_experts_per_tok"),
                intermediate_size=file.intermediate_size,
                renormalise=True,
                names=_MIXTRAL_NAMES,
            )
        }


def _qwen_experts(file: ConfigFile, shared_size: int) -> ExpertSpec:
    """Returns the experts of every layer, of every other one and so on, as config.json says."""
    without = set(file.mlp_only_layers or ())
    step = file.decoder_sparse_step
    return ExpertSpec(
        count=_num_experts(file),
        top_k=_number(file, "num_experts_per_tok"),
        intermediate_size=_number(file, "moe_intermediate_size"),
        renormalise=bool(file.norm_topk_prob),
        dense_layers=tuple(
            i for i in range(file.num_hidden_layers) if i in without or (i + 1) % step
        ),
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )


class Qwen2MoeSpec(Qwen2Spec, frozen=True, kw_only=True):
    """Qwen 1.5 and 2 with experts, and one that every token goes to by its own gate."""

    attention_bias: ClassVar[bool] = True

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.qkv_bias is False:
            raise UnsupportedField("qkv_bias", "projections without the biases of its family")
        return {"experts": _qwen_experts(file, _number(file, "shared_expert_intermediate_size"))}


class Qwen3MoeSpec(Qwen3Spec, frozen=True, kw_only=True):
    """Qwen 3 with experts."""

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {"experts": _qwen_experts(file, shared_size=0)}
