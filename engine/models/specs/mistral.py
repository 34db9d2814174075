"""Mistral, dense."""

from __future__ import annotations

import msgspec

from engine.models.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec, check_full_window

_DEFAULT_WINDOW = 4096
"""transformers takes it when config.json says nothing; releases without a window say null."""


class MistralSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama, where no sequence outgrows the sliding window."""

    @classmethod
    def check_window(cls, file: ConfigFile, max_model_len: int) -> None:
        super().check_window(file, max_model_len)
        window = file.sliding_window
        check_full_window(_DEFAULT_WINDOW if window is msgspec.UNSET else window, max_model_len)
