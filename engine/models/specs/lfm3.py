"""LFM3."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, check_kinds, of_each_layer
from engine.models.specs.conv import read_conv
from engine.models.specs.dense import HeadNorm, NormNames, OutputGate
from engine.models.specs.lfm import DENSE_NAMES, WRITTEN_NAMES
from engine.models.specs.windowed import WindowedSpec
from engine.rope import Rotary


class Lfm3Spec(WindowedSpec, frozen=True, kw_only=True):
    """LFM3: as LFM2, with attention over a window on some layers, gates of heads, and norms of what
    blocks add."""

    default_head_norm: ClassVar[HeadNorm] = "each"
    default_head_dim: ClassVar[int | None] = 128
    default_eps: ClassVar[float] = 1e-5
    default_tied: ClassVar[bool] = True
    default_theta: ClassVar[float] = 1_000_000.0
    default_rotary_part: ClassVar[float | None] = 1.0
    default_window: ClassVar[int] = 256
    local_theta: ClassVar[float | None] = 10_000.0
    full_layer_every: ClassVar[int] = 4
    mlp_module: ClassVar[str] = "feed_forward"
    default_output_gate: ClassVar[OutputGate] = "per_head"
    norms: ClassVar[NormNames] = NormNames(
        before_attention="operator_norm",
        after_attention="post_operator_norm",
        before_mlp="ffn_norm",
        after_mlp="post_ffn_norm",
    )
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = DENSE_NAMES
    written_names: ClassVar[tuple[tuple[str, str], ...]] = WRITTEN_NAMES

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        eps = file.rms_norm_eps if file.norm_eps is None else file.norm_eps
        return msgspec.structs.replace(file, rms_norm_eps=eps)

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        if file.rope.full_attention is None:
            raise UnsupportedField("rope_parameters", "layers that rotate alike")
        return super().read_rotary(file, max_model_len)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.use_sandwich_norm is False:
            raise UnsupportedField("use_sandwich_norm", "blocks without norms behind them")
        kinds = of_each_layer(file, "layer_types") or [
            "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 < i else "conv"
            for i in range(file.num_hidden_layers)
        ]
        check_kinds(kinds, {"conv", "full_attention", "sliding_attention"})
        windows = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        return {
            "window_layers": windows,
            "window_rotary": cls.read_window_rotary(file, max_model_len),
            "output_gate": "none" if file.use_attention_gate is False else "per_head",
            "conv": read_conv(file, kinds),
        }
