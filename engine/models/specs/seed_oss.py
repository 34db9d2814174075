"""Seed-OSS."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec


class SeedOssSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama whose queries, keys and values have biases, if config.json does not deny it."""

    default_attention_bias: ClassVar[bool] = True
    default_head_dim: ClassVar[int | None] = 128

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.attention_out_bias:
            raise UnsupportedField("attention_out_bias", "biases beyond those of its family")
        return {"attention_bias": file.attention_bias is not False}
