"""Describes linear attention, apart from the rest of its model."""

from __future__ import annotations

import msgspec

from engine.config import Dtype, KVLayers, ModelConfig
from engine.models.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.kv_planes import planes_of_heads
from kv_transfer.layout import DTYPE_BYTES, Plane

_STATE_DTYPE = "float32"
_FULL_LAYER_EVERY = 4
"""Says which layers have attention where config.json does not: the last of this many."""


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep a state instead of keys and values; see
    `engine.layers.linear_attention.DeltaSizes`.

    Attributes:
        layers: Their numbers, ascending.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_split: bool

    def planes(self, dtype: Dtype) -> tuple[Plane, ...]:
        """Returns what a layer keeps of a request: its state, and the last inputs of the
        convolution of queries, keys and values, which ranks cut by different heads."""
        last = (self.kernel - 1) * DTYPE_BYTES[dtype]
        state = self.key_dim * self.value_dim * DTYPE_BYTES[_STATE_DTYPE]
        return (
            Plane("state", self.value_heads, state),
            Plane("q_inputs", self.key_heads, self.key_dim * last),
            Plane("k_inputs", self.key_heads, self.key_dim * last),
            Plane("v_inputs", self.value_heads, self.value_dim * last),
        )

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns the layers with attention, and these in groups of as many."""
        full = [i for i in range(model.num_layers) if i not in self.layers]
        attention = planes_of_heads(model.heads_of(full[0]), model.dtype)
        planes = self.planes(model.dtype)
        return (
            KVLayers(layers=tuple(full), planes=attention),
            *(
                KVLayers(layers=self.layers[i : i + len(full)], planes=planes, is_state=True)
                for i in range(0, len(self.layers), len(full))
            ),
        )


def read_linear(file: ConfigFile, *, is_split: bool) -> LinearSpec:
    """Returns the layers with a state. Raises `UnsupportedField`."""
    every = file.full_attention_interval or _FULL_LAYER_EVERY
    kinds = of_each_layer(file, "layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(file.num_hidden_layers)
    ]
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if not 0 < len(layers) < file.num_hidden_layers:
        raise UnsupportedField("layer_types", "layers of one kind alone")
    linear = LinearSpec(
        layers=layers,
        key_heads=_number(file, "linear_num_key_heads"),
        value_heads=_number(file, "linear_num_value_heads"),
        key_dim=_number(file, "linear_key_head_dim"),
        value_dim=_number(file, "linear_value_head_dim"),
        kernel=_number(file, "linear_conv_kernel_dim"),
        is_split=is_split,
    )
    if linear.value_heads % linear.key_heads:
        heads = f"{linear.value_heads} value heads over {linear.key_heads} key heads"
        raise UnsupportedField("linear_num_value_heads", heads)
    if linear.kernel < 2:
        raise UnsupportedField("linear_conv_kernel_dim", "no convolution")
    return linear


def _number(file: ConfigFile, name: str) -> int:
    value: int | None = getattr(file, name)
    if value is None or value < 1:
        raise UnsupportedField(name, "linear attention without it")
    return value
