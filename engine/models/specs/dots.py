"""dots.llm1."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec, HeadNorm
from engine.models.specs.experts import sigmoid_experts


class Dots1Spec(DenseSpec, frozen=True, kw_only=True):
    """The experts of DeepSeek V3 beside attention with norms of each head."""

    default_head_norm: ClassVar[HeadNorm] = "each"
    num_dense: ClassVar[int | None] = 0

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        renormalises = file.norm_topk_prob is True
        return {"experts": sigmoid_experts(file, num_dense=0, renormalises=renormalises)}
