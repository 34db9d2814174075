"""Gemma 4, text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.head_sizes import HeadSizes
from engine.models.config_file import ConfigFile, RopeFields
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import HeadNorm
from engine.models.specs.gemma import GemmaSpec

_FULL, _WINDOW = "full_attention", "sliding_attention"
_FULL_HEAD_DIM = 512
_ROPE = RopeFields(
    full_attention=RopeFields(
        rope_type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25
    ),
    sliding_attention=RopeFields(rope_theta=10_000.0),
)
"""transformers takes it where config.json says nothing."""


class Gemma4Spec(GemmaSpec, frozen=True, kw_only=True):
    """Heads that are wider, and KV heads that are fewer, in layers that see everything, where
    values may be projected by the weights of keys; norms of queries, keys and values; each layer
    scales the stream. Weights of norms are stored as they are."""

    norm_offset: ClassVar[float] = 0.0
    default_head_norm: ClassVar[HeadNorm] = "each"
    value_norm: ClassVar[bool] = True
    scales_layers: ClassVar[bool] = True
    default_window: ClassVar[int] = 512
    full_layer_every: ClassVar[int] = 6
    default_rotary_part: ClassVar[float | None] = 1.0
    local_theta: ClassVar[float | None] = 10_000.0

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        every = cls.full_layer_every
        kinds = file.layer_types or [
            _WINDOW if (i + 1) % every else _FULL for i in range(file.num_hidden_layers)
        ]
        return msgspec.structs.replace(
            file,
            # As in transformers the last layer sees everything, whatever is said.
            layer_types=[*kinds[:-1], _FULL],
            rope_parameters=file.rope_parameters or _ROPE,
            num_global_key_value_heads=_of_full_layers(file, kinds, "num_key_value_heads")
            or (file.num_global_key_value_heads if file.attention_k_eq_v else None),
            global_head_dim=_of_full_layers(file, kinds, "head_dim")
            or file.global_head_dim
            or _FULL_HEAD_DIM,
        )

    @classmethod
    def head_dim_of(cls, file: ConfigFile) -> int:
        return file.global_head_dim or _FULL_HEAD_DIM

    @classmethod
    def window_head_dim_of(cls, file: ConfigFile) -> int:
        return file.head_dim or cls.default_head_dim or 0

    @classmethod
    def read_heads(cls, file: ConfigFile) -> tuple[HeadSizes, ...]:
        count, kv_heads = file.num_attention_heads, file.num_kv_heads
        full = HeadSizes.alike(
            count, file.num_global_key_value_heads or kv_heads, cls.head_dim_of(file)
        )
        local = HeadSizes.alike(count, kv_heads, cls.window_head_dim_of(file))
        return tuple(local if kind == _WINDOW else full for kind in file.layer_types or ())

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.use_bidirectional_attention == "vision":
            # So tokens of images see each other, and no image is read.
            file = msgspec.structs.replace(file, use_bidirectional_attention=None)
        more = super().read_more(file, max_model_len)
        local = set(more["window_layers"])
        full = tuple(i for i in range(file.num_hidden_layers) if i not in local)
        return {
            **more,
            "attention_scale": 1.0,
            "shared_projections": full if file.attention_k_eq_v else (),
        }

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if file.num_kv_shared_layers:
            yield UnsupportedField("num_kv_shared_layers", "layers that share keys and values")
        # transformers takes 256 where nothing is said.
        if file.hidden_size_per_layer_input != 0:
            yield UnsupportedField("hidden_size_per_layer_input", "embeddings of each layer")
        if file.enable_moe_block:
            yield UnsupportedField("enable_moe_block", "experts beside a dense block")


def _of_full_layers(file: ConfigFile, kinds: list[str], name: str) -> int | None:
    """Returns what transformers writes of layers that see everything; None: nothing. Raises
    `UnsupportedField` where other layers, or some of these alone, have a number of their own."""
    changes = file.per_layer_config or {}
    found = {
        number: fields[name] for number, fields in changes.items() if fields.get(name) is not None
    }
    numbers = set(found.values())
    full = {str(i) for i, kind in enumerate(kinds) if kind == _FULL}
    if not found:
        return None
    (number,) = numbers if len(numbers) == 1 else (None,)
    if set(found) != full or not isinstance(number, int):
        raise UnsupportedField("per_layer_config", f"{name} of layers of one kind that differ")
    return number
