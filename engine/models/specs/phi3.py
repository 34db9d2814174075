"""Phi-3 and Phi-4, dense."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.models.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec
from engine.models.specs.rope import read_llama3_or_plain, read_longrope
from engine.rope import AnyRopeScaling

_LONGROPE_NAMES = ("longrope", "su")
"""The second is that of early releases."""


class Phi3Spec(DenseSpec, frozen=True, kw_only=True):
    """Fused tensors in the checkpoint, LongRoPE, and a sliding window."""

    fused_projections: ClassVar[bool] = True

    @classmethod
    def read_rope(cls, file: ConfigFile, max_model_len: int) -> AnyRopeScaling | None:
        if file.rope.kind in _LONGROPE_NAMES:
            return read_longrope(file, cls.head_dim_of(file), max_model_len)
        return read_llama3_or_plain(file)

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        super().read_window(file)
        return None if file.sliding_window is msgspec.UNSET else file.sliding_window
