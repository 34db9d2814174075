"""SmolLM3."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import of_each_layer
from engine.models.specs.dense import DenseSpec


class SmolLM3Spec(DenseSpec, frozen=True, kw_only=True):
    """Llama with layers that do not rotate: every fourth where config.json does not say."""

    default_tied: ClassVar[bool] = True
    default_theta: ClassVar[float] = 2_000_000.0

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        layers = range(file.num_hidden_layers)
        every = file.no_rope_layer_interval
        rotates = of_each_layer(file, "no_rope_layers") or [(i + 1) % every for i in layers]
        return {"unrotated_layers": tuple(i for i in layers if not rotates[i])}
