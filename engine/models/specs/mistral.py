"""Mistral, dense."""

from __future__ import annotations

import msgspec

from engine.models.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec

_DEFAULT_WINDOW = 4096
"""transformers takes it when config.json says nothing; releases without a window say null."""


class MistralSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama with a sliding window."""

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        super().read_window(file)
        window = file.sliding_window
        return _DEFAULT_WINDOW if window is msgspec.UNSET else window
