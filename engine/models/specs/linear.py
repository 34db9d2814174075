"""Describes linear attention, apart from the rest of its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from engine.config import Dtype
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.states import STATE_DTYPE, StateSpec, state_layers, state_number
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane

_FULL_LAYER_EVERY = 4
"""Says which layers have attention where config.json does not: the last of this many."""


class DeltaSpec(StateSpec, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Layers with the gated delta rule; see `engine.layers.states.linear_attention.DeltaSizes`.
    Nodes compare its repr, which a new field must not change."""

    flops_per_element: ClassVar[int] = 7
    """Decay, read, correct, read again."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def planes(self, dtype: Dtype) -> tuple[Plane, ...]:
        """Returns a state, and the last inputs of the convolution of queries, keys and values,
        which ranks cut by different heads."""
        last = (self.kernel - 1) * DTYPE_BYTES[dtype]
        state = self.key_dim * self.value_dim * DTYPE_BYTES[STATE_DTYPE]
        return (
            Plane("state", self.value_heads, state),
            Plane("q_inputs", self.key_heads, self.key_dim * last),
            Plane("k_inputs", self.key_heads, self.key_dim * last),
            Plane("v_inputs", self.value_heads, self.value_dim * last),
        )

    @property
    def elements(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def counts(self) -> tuple[tuple[int, str], ...]:
        return ((self.key_heads, "key heads of linear attention"),)


class LinearSpec(DeltaSpec, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Gated DeltaNet.

    Attributes:
        is_split: See `engine.layers.states.linear_attention.DeltaForm`; so is `is_apart`.
        rate_scale: See `ops.gated_delta_rule`.
        eps: Of the norm of what is read; None: as of others.
    """

    module: ClassVar[str] = "linear_attn"

    is_split: bool
    is_apart: bool = False
    rate_scale: float = 1.0
    eps: float | None = None

    def projections(self, hidden_size: int) -> Iterator[tuple[str, int, int]]:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        yield "in_proj_qkvz", hidden_size, 2 * keys + 2 * values
        yield "in_proj_ba", hidden_size, 2 * self.value_heads
        yield "out_proj", values, hidden_size


def read_linear(file: ConfigFile, *, is_split: bool, **more: Any) -> LinearSpec:
    """Returns the layers with a state, with `more` fields. Raises `UnsupportedField`."""
    every = file.full_attention_interval or _FULL_LAYER_EVERY
    kinds = [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(file.num_hidden_layers)
    ]
    linear = LinearSpec(
        layers=state_layers(file, kinds),
        key_heads=state_number(file, "linear_num_key_heads"),
        value_heads=state_number(file, "linear_num_value_heads"),
        key_dim=state_number(file, "linear_key_head_dim"),
        value_dim=state_number(file, "linear_value_head_dim"),
        kernel=state_number(file, "linear_conv_kernel_dim"),
        is_split=is_split,
        **more,
    )
    check_delta(linear)
    return linear


def check_delta(linear: DeltaSpec) -> None:
    """Raises `UnsupportedField` for sizes that no layer has."""
    if linear.value_heads % linear.key_heads:
        heads = f"{linear.value_heads} value heads over {linear.key_heads} key heads"
        raise UnsupportedField("linear_num_value_heads", heads)
    if linear.kernel < 2:
        raise UnsupportedField("linear_conv_kernel_dim", "no convolution")
