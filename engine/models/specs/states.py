"""Describes layers that keep a state instead of keys and values, whatever their kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import ClassVar

import msgspec

from engine.config import Dtype, KVLayers, ModelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.kv_planes import layers_alike
from engine.rope import Rotary
from kv_transfer.planes import Plane

STATE_DTYPE = "float32"
LINEAR_KINDS = {"linear_attention", "mamba"}
"""Releases of transformers and publishers differ in the name."""
MIXED_KINDS = LINEAR_KINDS | {"full_attention"}


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep a state.

    Attributes:
        module: Their block's name in the checkpoint.
        flops_per_element: Of a state, for each token.
        layers: Their numbers, ascending.
        beside_attention: They have attention as well, which reads and adds what they do.
    """

    module: ClassVar[str]
    flops_per_element: ClassVar[int]

    layers: tuple[int, ...]
    beside_attention: bool = False

    def leaves_attention(self, layer: int) -> bool:
        """Returns whether a layer of the model has attention."""
        return self.beside_attention or layer not in self.layers

    @abstractmethod
    def planes(self, dtype: Dtype) -> tuple[Plane, ...]:
        """Returns what a layer keeps of a request."""

    @property
    def turn(self) -> tuple[int, Rotary] | None:
        """Returns the size of heads that rotate, and how they do; None: they do not."""
        return None

    @property
    @abstractmethod
    def elements(self) -> int:
        """Returns the numbers of a layer's state."""

    @property
    @abstractmethod
    def counts(self) -> tuple[tuple[int, str], ...]:
        """Returns what ranks must share evenly, with its name."""

    @abstractmethod
    def projections(self, hidden_size: int) -> Iterator[tuple[str, int, int]]:
        """Yields (name, inputs, outputs) of a layer's linear layers."""

    def kv_layers(
        self, model: ModelConfig, local: Collection[int], window: int | None
    ) -> tuple[KVLayers, ...]:
        """Returns the layers with attention, of which those in `local` have the window, and these
        in groups of as many."""
        attending = [i for i in range(model.num_layers) if self.leaves_attention(i)]
        return self.kv_layers_beside(model, layers_alike(model, attending, local, window))

    def kv_layers_beside(
        self, model: ModelConfig, attention: tuple[KVLayers, ...]
    ) -> tuple[KVLayers, ...]:
        """Returns layers with `attention`, and these in groups of as many."""
        size = max(len(group.layers) for group in attention)
        planes = self.planes(model.dtype)
        return (
            *attention,
            *(
                KVLayers(layers=self.layers[i : i + size], planes=planes, is_state=True)
                for i in range(0, len(self.layers), size)
            ),
        )


def state_layers(file: ConfigFile, kinds: list[str] | None = None) -> tuple[int, ...]:
    """Returns the layers that keep a state, by `layer_types`; where it says nothing, by `kinds`.
    Raises `UnsupportedField`."""
    kinds = of_each_layer(file, "layer_types") or kinds or []
    layers = tuple(i for i, kind in enumerate(kinds) if kind in LINEAR_KINDS)
    if not 0 < len(layers) < file.num_hidden_layers:
        raise UnsupportedField("layer_types", "layers of one kind alone")
    return layers


def state_number(file: ConfigFile, name: str) -> int:
    """Returns a size that layers with a state must have. Raises `UnsupportedField`."""
    value: int | None = getattr(file, name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedField(name, "layers that keep a state without it")
    return value
