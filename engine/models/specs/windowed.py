"""Decoders with a sliding window on some layers, and full attention on the others."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile, RopeFields
from engine.models.specs.base import check_kinds, of_each_layer
from engine.models.specs.dense import DenseSpec
from engine.models.specs.rope import read_rotary
from engine.rope import Rotary


class WindowedSpec(DenseSpec, frozen=True, kw_only=True):
    """Reads which layers have a window, and how each kind rotates.

    Attributes:
        default_window: Where config.json says nothing.
        full_layer_every: Says which layers see everything where config.json does not: one of so
            many, the last.
        local_theta: The base by which layers with a window rotate, plainly, where config.json does
            not say; None: they rotate as all others.
    """

    default_window: ClassVar[int] = 4096
    full_layer_every: ClassVar[int]
    local_theta: ClassVar[float | None] = None

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        return cls.default_window if file.sliding_window is msgspec.UNSET else file.sliding_window

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        theta = file.rope_theta or cls.default_theta
        rope = file.rope.full_attention or file.rope
        part, head_dim = cls.default_rotary_part or 1.0, cls.head_dim_of(file)
        return read_rotary(file, head_dim, max_model_len, rope=rope, theta=theta, partial=part)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        check_kinds(file.layer_types, {"full_attention", "sliding_attention"})
        said = file.sliding_window_pattern
        every = said if isinstance(said, int) and said else cls.full_layer_every
        kinds = of_each_layer(file, "layer_types") or [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention"
            for i in range(file.num_hidden_layers)
        ]
        return {
            "window_layers": tuple(
                i for i, kind in enumerate(kinds) if kind == "sliding_attention"
            ),
            "window_rotary": cls.read_window_rotary(file, max_model_len),
        }

    @classmethod
    def read_window_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary | None:
        """Returns how layers with a window rotate: scaling is for the others alone."""
        theta = file.swa_rope_theta or file.rope_local_base_freq or cls.local_theta
        if theta is None:
            return None
        local = file.rope.sliding_attention or RopeFields()
        part, head_dim = cls.default_rotary_part or 1.0, cls.window_head_dim_of(file)
        return read_rotary(file, head_dim, max_model_len, rope=local, theta=theta, partial=part)

    @classmethod
    def window_head_dim_of(cls, file: ConfigFile) -> int:
        """Returns the size of a head in layers with a window."""
        return cls.head_dim_of(file)
