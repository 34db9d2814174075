"""Describes layers of Mamba 2, apart from the rest of their model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from engine.config import Dtype
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.states import STATE_DTYPE, StateSpec, state_layers, state_number
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane


class MambaSpec(StateSpec, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Layers of Mamba 2; see `engine.layers.states.mamba.MambaSizes`. Nodes compare its repr, which
    a new field must not change.

    Attributes:
        eps: Of the norm of what is read.
    """

    module: ClassVar[str] = "mamba"
    flops_per_element: ClassVar[int] = 5
    """Decay, take in, read."""

    heads: int
    groups: int
    head_dim: int
    size: int
    kernel: int
    conv_bias: bool
    eps: float
    is_normed: bool = True
    input_scales: tuple[float, ...] = ()
    output_scale: float = 1.0

    def planes(self, dtype: Dtype) -> tuple[Plane, ...]:
        """Returns a state, and the last inputs of the convolution: of heads, and of groups, which
        ranks share in another way. Ranks beyond their number have the same one."""
        last = (self.kernel - 1) * DTYPE_BYTES[dtype]
        state = self.size * self.head_dim * DTYPE_BYTES[STATE_DTYPE]
        return (
            Plane("state", self.heads, state),
            Plane("x_inputs", self.heads, self.head_dim * last),
            Plane("b_inputs", self.groups, self.size * last),
            Plane("c_inputs", self.groups, self.size * last),
        )

    @property
    def elements(self) -> int:
        return self.heads * self.size * self.head_dim

    @property
    def counts(self) -> tuple[tuple[int, str], ...]:
        return ((self.heads, "heads of Mamba layers"),)

    def projections(self, hidden_size: int) -> Iterator[tuple[str, int, int]]:
        inner = self.heads * self.head_dim
        yield "in_proj", hidden_size, 2 * (inner + self.groups * self.size) + self.heads
        yield "out_proj", inner, hidden_size


def read_mamba(file: ConfigFile, eps: float, *, layers: tuple[int, ...] | None = None) -> MambaSpec:
    """Returns the layers with a state, from the names that most families have; `eps` is that of
    norms. `layers`: which those are; None: `layer_types` says so. Raises `UnsupportedField`."""
    heads = state_number(file, "mamba_n_heads")
    inner = file.mamba_d_ssm or int(file.mamba_expand * file.hidden_size)
    if file.mamba_d_head == "auto" and inner % heads:
        raise UnsupportedField("mamba_n_heads", f"{heads} heads of {inner} numbers together")
    head_dim = inner // heads if file.mamba_d_head == "auto" else file.mamba_d_head
    mamba = MambaSpec(
        layers=state_layers(file) if layers is None else layers,
        heads=heads,
        groups=state_number(file, "mamba_n_groups"),
        head_dim=head_dim if isinstance(head_dim, int) else 0,
        size=state_number(file, "mamba_d_state"),
        kernel=state_number(file, "mamba_d_conv"),
        conv_bias=file.mamba_conv_bias,
        eps=eps,
    )
    if mamba.head_dim < 1:
        raise UnsupportedField("mamba_d_head", repr(file.mamba_d_head))
    if heads % mamba.groups:
        raise UnsupportedField("mamba_n_groups", f"{mamba.groups} groups of {heads} heads")
    if mamba.kernel < 2:
        raise UnsupportedField("mamba_d_conv", "no convolution")
    if file.mamba_proj_bias:
        raise UnsupportedField("mamba_proj_bias", "biases beyond those of its family")
    check_step_limit(file)
    return mamba


def check_step_limit(file: ConfigFile) -> None:
    """Raises `UnsupportedField` for bounds of dt that steps can meet."""
    infinite = {"__float__": "Infinity"}
    limit = [math.inf if one == infinite else one for one in file.time_step_limit or ()]
    if limit and limit != [0.0, math.inf]:
        raise UnsupportedField("time_step_limit", f"steps within {limit}")
