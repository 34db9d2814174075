"""EXAONE 4."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import HeadNorm, NormNames
from engine.models.specs.olmo import OLMO_NORMS
from engine.models.specs.windowed import WindowedSpec


class Exaone4Spec(WindowedSpec, frozen=True, kw_only=True):
    """Norms behind the blocks, as OLMo 2, and of each head. Where layers have a window, those that
    see everything do not rotate."""

    default_eps: ClassVar[float] = 1e-5
    default_head_norm: ClassVar[HeadNorm] = "each"
    full_layer_every: ClassVar[int] = 4
    norms: ClassVar[NormNames] = OLMO_NORMS

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if cls.read_window(file) is None:
            return {}
        pattern = file.sliding_window_pattern
        if isinstance(pattern, str) and not file.layer_types:
            layers = file.num_hidden_layers
            kinds = [pattern[i % len(pattern)] == "L" for i in range(layers - 1)] + [False]
            names = ["sliding_attention" if is_local else "full_attention" for is_local in kinds]
            file = msgspec.structs.replace(file, layer_types=names[:layers])
        more = super().read_more(file, max_model_len)
        local = set(more["window_layers"])
        others = tuple(i for i in range(file.num_hidden_layers) if i not in local)
        return {**more, "unrotated_layers": others}
