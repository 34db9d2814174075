"""Llama 2 and 3."""

from __future__ import annotations

from engine.models.specs.dense import DenseSpec


class LlamaSpec(DenseSpec, frozen=True, kw_only=True):
    """The plain dense decoder; Llama 3.1 and later scale their rotary frequencies."""
