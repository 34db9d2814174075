"""Llama 2 and 3, and what is a Llama by another name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec


class LlamaSpec(DenseSpec, frozen=True, kw_only=True):
    """The plain dense decoder; Llama 3.1 and later scale their rotary frequencies."""


class InternLM3Spec(LlamaSpec, frozen=True, kw_only=True):
    """Llama with other defaults, and other names of its biases."""

    default_eps: ClassVar[float] = 1e-5
    default_head_dim: ClassVar[int | None] = 128

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        for name in ("bias", "qkv_bias"):
            if getattr(file, name):
                yield UnsupportedField(name, "biases beyond those of its family")


class IQuestCoderSpec(InternLM3Spec, frozen=True, kw_only=True):
    """The same; nothing that was released bounds queries, keys and values."""

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if file.clip_qkv is not None:
            yield UnsupportedField("clip_qkv", "a bound of queries, keys and values")


class TeleChat3Spec(LlamaSpec, frozen=True, kw_only=True):
    """Llama whose YaRN has a number of its own; see `engine.models.specs.rope`."""
