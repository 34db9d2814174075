"""ERNIE 4.5, dense."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec


class Ernie45Spec(DenseSpec, frozen=True, kw_only=True):
    """Llama whose heads rotate in interleaved pairs."""

    default_eps: ClassVar[float] = 1e-5
    default_tied: ClassVar[bool] = True
    default_head_dim: ClassVar[int | None] = 128
    default_theta: ClassVar[float] = 500_000.0
    interleaved_rotary: ClassVar[bool] = True

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.use_bias:
            raise UnsupportedField("use_bias", "biases beyond those of its family")
        return {}
