"""Describes lightning attention, apart from the rest of its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from engine.config import Dtype
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, kind_faults
from engine.models.specs.rope import read_rotary
from engine.models.specs.states import MIXED_KINDS, STATE_DTYPE, StateSpec, state_layers
from engine.rope import Rotary
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane

ROTATING_PART, ROTATING_THETA = 0.5, 600_000.0
"""Ring and Ling have these where config.json does not say."""


class LightningSpec(StateSpec, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Layers of `engine.layers.states.lightning`. Nodes compare its repr, which a new field must
    not change.

    Attributes:
        groups: Of neighbouring heads that are normed together.
        eps: Of that norm.
        by_head: The checkpoint has query, key and value of a head behind each other.
        rotary: How queries and keys rotate, which then have norms of their own; None: SiLU is taken
            of them, and of values.
        layer_eps: Added to the number of layers over which the decays fall.
    """

    module: ClassVar[str] = "self_attn"
    flops_per_element: ClassVar[int] = 5
    """Decay, take in, read."""

    heads: int
    head_dim: int
    groups: int
    eps: float
    by_head: bool = False
    rotary: Rotary | None = None
    layer_eps: float = 0.0

    def planes(self, dtype: Dtype) -> tuple[Plane, ...]:
        """Returns a state: there is no convolution."""
        state = self.head_dim * self.head_dim * DTYPE_BYTES[STATE_DTYPE]
        return (Plane("state", self.heads, state),)

    @property
    def elements(self) -> int:
        return self.heads * self.head_dim * self.head_dim

    @property
    def counts(self) -> tuple[tuple[int, str], ...]:
        return ((self.heads, "heads of lightning attention"),)

    @property
    def turn(self) -> tuple[int, Rotary] | None:
        return None if self.rotary is None else (self.head_dim, self.rotary)

    def projections(self, hidden_size: int) -> Iterator[tuple[str, int, int]]:
        inner = self.heads * self.head_dim
        yield "qkv_proj", hidden_size, 4 * inner
        yield "o_proj", inner, hidden_size


def check_lightning(file: ConfigFile, spec: LightningSpec) -> None:
    """Raises `UnsupportedField` for heads that no layer has."""
    if spec.heads & (spec.heads - 1):
        raise UnsupportedField("num_attention_heads", f"{spec.heads} heads, no power of two")
    if spec.groups < 1 or spec.heads % spec.groups:
        raise UnsupportedField("group_norm_size", f"{spec.groups} groups of {spec.heads} heads")
    if file.num_hidden_layers == 1:
        raise UnsupportedField("num_hidden_layers", "decays of a single layer")


def _layers(file: ConfigFile) -> tuple[int, ...]:
    """Returns the layers that keep a state: all but the last of each group, and but those behind
    the last whole group. Raises `UnsupportedField`."""
    every, count = file.layer_group_size or 1, file.num_hidden_layers
    linear = [(i + 1) % every > 0 and i < count // every * every for i in range(count)]
    return state_layers(file, ["linear_attention" if one else "full_attention" for one in linear])


def head_dim_of(file: ConfigFile) -> int:
    """Returns the size of heads of Ring's and Ling's layers that keep a state."""
    return file.head_dim or file.hidden_size // file.num_attention_heads


def read_rotating(file: ConfigFile, max_model_len: int, eps: float) -> LightningSpec:
    """Returns the layers of Ring and Ling. Decays are those of the program that trained them and of
    SGLang, for which their authors wrote them: the modeling code beside the weights takes one from
    layer numbers that begin with 0, as if they began with 1. Raises `UnsupportedField`."""
    heads, head_dim = file.num_attention_heads, head_dim_of(file)
    part = ROTATING_PART if file.rotary_dim is None else file.rotary_dim / head_dim
    spec = LightningSpec(
        layers=_layers(file),
        heads=heads,
        head_dim=head_dim,
        groups=1 if file.group_norm_size is None else file.group_norm_size,
        eps=eps,
        rotary=read_rotary(
            file, head_dim, max_model_len, partial=part, theta=file.rope_theta or ROTATING_THETA
        ),
    )
    check_lightning(file, spec)
    return spec


def rotating_faults(file: ConfigFile) -> Iterator[UnsupportedField]:
    """Yields what config.json of Ring and Ling asks for and is not here."""
    yield from kind_faults(file.layer_types, MIXED_KINDS)
    if file.linear_silu:
        yield UnsupportedField("linear_silu", "SiLU of queries and keys that rotate")
    if file.use_qk_norm is False:
        yield UnsupportedField("use_qk_norm", "queries and keys without norms")
    if file.use_qkv_bias or file.use_bias:
        yield UnsupportedField("use_qkv_bias", "biases beyond those of its family")
