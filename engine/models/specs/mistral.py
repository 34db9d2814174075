"""Mistral and Ministral, dense."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec
from engine.models.specs.rope import read_query_scale

_DEFAULT_WINDOW = 4096
"""transformers takes it when config.json says nothing; releases without a window say null."""


class MistralSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama with a sliding window."""

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        super().read_window(file)
        window = file.sliding_window
        return _DEFAULT_WINDOW if window is msgspec.UNSET else window


class Ministral3Spec(MistralSpec, frozen=True, kw_only=True):
    """Mistral whose scores grow with the position, behind the context that it was first made
    for."""

    default_eps: ClassVar[float] = 1e-5

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        return None if file.sliding_window is msgspec.UNSET else super().read_window(file)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {"query_scale": read_query_scale(file, max_model_len)}
