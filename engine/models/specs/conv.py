"""Describes layers with a gated short convolution, apart from the rest of their model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from engine.config import Dtype
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.states import StateSpec, state_number
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane


class ConvSpec(StateSpec, frozen=True, kw_only=True):
    """Layers of `engine.layers.states.short_conv`: a state is the last inputs of a convolution."""

    module: ClassVar[str] = "conv"
    flops_per_element: ClassVar[int] = 2

    channels: int
    kernel: int

    def planes(self, dtype: Dtype) -> tuple[Plane, ...]:
        """Returns the last inputs, of each channel for itself."""
        return (Plane("inputs", self.channels, (self.kernel - 1) * DTYPE_BYTES[dtype]),)

    @property
    def elements(self) -> int:
        return self.channels * self.kernel

    @property
    def counts(self) -> tuple[tuple[int, str], ...]:
        return ((self.channels, "channels of convolutions"),)

    def projections(self, hidden_size: int) -> Iterator[tuple[str, int, int]]:
        yield "in_proj", hidden_size, 3 * self.channels
        yield "out_proj", self.channels, hidden_size


def read_conv(file: ConfigFile, kinds: list[str]) -> ConvSpec:
    """Returns the layers that are called "conv". Raises `UnsupportedField`."""
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "conv")
    if not 0 < len(layers) < file.num_hidden_layers:
        raise UnsupportedField("layer_types", "layers of one kind alone")
    if file.conv_bias:
        raise UnsupportedField("conv_bias", "biases beyond those of its family")
    kernel = state_number(file, "conv_L_cache")
    if kernel < 2:
        raise UnsupportedField("conv_L_cache", "no convolution")
    return ConvSpec(layers=layers, channels=file.hidden_size, kernel=kernel)
