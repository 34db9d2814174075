"""Qwen3-Next and Qwen3.5: most layers keep a state, every fourth has gated attention."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.ahead import AheadNames
from engine.models.specs.base import UnsupportedField, check_kinds
from engine.models.specs.dense import OutputGate
from engine.models.specs.experts import ExpertSpec, number_of
from engine.models.specs.linear import read_linear
from engine.models.specs.qwen import Qwen3Spec
from engine.models.specs.qwen_moe import qwen_experts

_KINDS = {"linear_attention", "full_attention"}


class HybridSpec(Qwen3Spec, frozen=True, kw_only=True):
    """Holds what these models share: norms whose weights are stored as their distance from 1, a
    quarter of each head rotates, and heads are gated.

    Attributes:
        is_split: See `LinearSpec`.
    """

    default_head_dim: ClassVar[int | None] = 256
    default_rotary_part: ClassVar[float | None] = 0.25
    norm_offset: ClassVar[float] = 1.0
    default_output_gate: ClassVar[OutputGate] = "paired"
    ahead: ClassVar[AheadNames] = AheadNames(
        layer="mtp.layers.{}",
        embedding_norm="mtp.pre_fc_norm_embedding",
        feature_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        counts_on=False,
        field="mtp_num_hidden_layers",
        feeds_norm=True,
    )
    other_weights: ClassVar[tuple[str, ...]] = ("mtp.",)
    is_split: ClassVar[bool]

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        check_kinds(file.layer_types, _KINDS)
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.attn_output_gate is False:
            raise UnsupportedField("attn_output_gate", "attention without the gate of its family")
        # More layers share what makes their input: drafts behind the first are the first one's.
        has_ahead = file.mtp_num_hidden_layers != 0 and not file.mtp_use_dedicated_embeddings
        linear = read_linear(file, is_split=cls.is_split)
        return {"linear": linear, "num_extra_layers": int(has_ahead)}


class Qwen3NextSpec(HybridSpec, frozen=True, kw_only=True):
    """Qwen3-Next: many small experts beside a shared one."""

    is_split: ClassVar[bool] = False

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {**super().read_more(file, max_model_len), "experts": _experts(file)}


class Qwen35Spec(HybridSpec, frozen=True, kw_only=True):
    """Qwen3.5, dense."""

    is_split: ClassVar[bool] = True


class Qwen35MoeSpec(HybridSpec, frozen=True, kw_only=True):
    """Qwen3.5 and 3.6 with experts."""

    is_split: ClassVar[bool] = True
    has_dense_layers: ClassVar[bool] = False

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {**super().read_more(file, max_model_len), "experts": _experts(file)}


def _experts(file: ConfigFile) -> ExpertSpec:
    shared_size = number_of(file, "shared_expert_intermediate_size")
    return qwen_experts(file, shared_size, renormalises_by_default=True)
