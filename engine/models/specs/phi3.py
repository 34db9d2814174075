"""Phi-3 and Phi-4, dense."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec


class Phi3Spec(DenseSpec, frozen=True, kw_only=True):
    """Fused tensors in the checkpoint, a part of each head rotates, and a sliding window."""

    default_eps: ClassVar[float] = 1e-5
    fused_qkv: ClassVar[bool] = True
    fused_gate_up: ClassVar[bool] = True
    default_rotary_part: ClassVar[float | None] = 1.0

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        super().read_window(file)
        return None if file.sliding_window is msgspec.UNSET else file.sliding_window
