"""Granite 3 and 4, dense."""

from __future__ import annotations

from typing import Any

from engine.models.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec


class GraniteSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama with multipliers of embeddings, of what layers add, of scores and of logits."""

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        added = file.residual_multiplier
        if added <= 0.0 or file.logits_scaling <= 0.0:
            raise UnsupportedField("residual_multiplier", "a multiplier that is not above 0")
        return {
            # (x / r) / rms(x / r) is x / rms(x), if what keeps the root from 0 is divided, too.
            "rms_norm_eps": cls.eps_of(file) / added**2,
            "stream_scale": file.embedding_multiplier / added,
            "attention_scale": file.attention_multiplier or 1.0,
            "logit_scale": 1.0 / file.logits_scaling,
        }
