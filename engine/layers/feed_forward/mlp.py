"""The feed-forward block, gated or not. Source: Shazeer, GLU Variants (arXiv 2002.05202)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.linear import (
    GateUpParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from engine.layers.methods.base import ColumnPart
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import RowForm, Rows
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.elementwise.gate_form import GateForm


class DenseMLP(nn.Module):
    """Adds what `down` makes of activated `x` [T, H] to the residual stream.

    Args:
        norm: Of what is added; None: none.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, shard: Shard, norm: RMSNorm | None
    ) -> None:
        super().__init__()
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, shard.at("down_proj"))
        self.norm = norm

    @property
    @abstractmethod
    def input_form(self) -> RowForm | None:
        """Returns how inputs are best given; see `LinearMethod`."""

    @abstractmethod
    def _activated(self, x: Rows) -> Rows: ...

    def plain_weights(self, form: GateForm | None) -> tuple[Tensor, Tensor] | None:
        """Returns the weights of both GEMMs, [2 I, H] or [I, H] and [H, I], gate before up, where
        they are plain and the activation between them is `form`; None: SiLU. Else returns None."""
        first = self._plain_input(form)
        second = self.down_proj.method.plain_weight(self.down_proj)
        return None if first is None or second is None else (first, second)

    @abstractmethod
    def _plain_input(self, form: GateForm | None) -> Tensor | None: ...

    @abstractmethod
    def checkpoint_weights(self, prefix: str, *, is_fused: bool) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `is_fused` says that gate and up are one tensor."""

    def forward(self, x: Rows, stream: ResidualStream) -> None:
        """Computes the MLP of the normed `x`: [T, H]."""
        self.down_proj.add_to(stream, self._activated(x), self.norm)

    def partial(self, x: Rows) -> Tensor:
        """Returns this rank's part of the sum over ranks, [T, H], instead of adding it."""
        return self.down_proj.partial(self._activated(x))

    def accumulate(self, x: Rows, out: Tensor) -> None:
        """Adds this rank's part of the sum over ranks to `out`, [T, H]."""
        self.down_proj.accumulate(self._activated(x), out)


class GatedMLP(DenseMLP):
    """Computes `down(activation(gate(x)) * up(x))`.

    Args:
        is_gelu: The activation is GELU by its tanh formula, not SiLU.
        gate, scales: See `GateUpParallelLinear`.
        norm: Of what is added; None: none.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        shard: Shard,
        *,
        is_gelu: bool = False,
        gate: GateForm | None = None,
        norm: RMSNorm | None = None,
        scales: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, shard, norm)
        self.gate_up_proj = GateUpParallelLinear(
            hidden_size, intermediate_size, shard, is_gelu=is_gelu, gate=gate, scales=scales
        )

    @property
    def input_form(self) -> RowForm | None:
        return self.gate_up_proj.input_form

    def _activated(self, x: Rows) -> Rows:
        return self.gate_up_proj.activated(x, self.down_proj.input_form)

    def _plain_input(self, form: GateForm | None) -> Tensor | None:
        layer = self.gate_up_proj
        is_other = layer.is_gelu or layer.scales is not None or layer.gate != form
        return None if is_other else layer.method.plain_weight(layer)

    def checkpoint_weights(self, prefix: str, *, is_fused: bool) -> Iterator[CheckpointWeight]:
        names = ("gate_up_proj",) if is_fused else ("gate_proj", "up_proj")
        yield from self.gate_up_proj.checkpoint_weights(*(f"{prefix}.{name}" for name in names))
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")


class CutGateMLP(GatedMLP):
    """A block with GELU whose gates count by how far they are above their mean and `cutoff`
    standard deviations, over the units of all ranks; those below are zero. Source: Gemma 3n
    (Google, 2025)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        shard: Shard,
        cutoff: float,
        norm: RMSNorm | None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, shard, is_gelu=True, norm=norm)
        self.cutoff, self.units, self.group = cutoff, intermediate_size, shard.tp

    def _activated(self, x: Rows) -> Rows:
        layer = self.gate_up_proj
        gates, up = layer.method.apply_rows(layer, x).chunk(2, dim=1)
        wide = gates.float()
        mean = self._mean(wide)
        deviation = self._mean((wide - mean).square()).sqrt()
        kept = torch.relu(wide - (mean + deviation * self.cutoff)).to(gates.dtype)
        return ops.gelu_tanh_and_mul(torch.cat((kept, up), dim=1))

    def _mean(self, x: Tensor) -> Tensor:
        """Returns the mean of each row over all ranks, [T, 1]."""
        return self.group.all_reduce(x.sum(1, keepdim=True)) / self.units


class SquaredMLP(DenseMLP):
    """Computes `down(relu(up(x)) ** 2)`. Source: So et al., Primer (arXiv 2109.08668).

    Args:
        norm: Of what is added; None: none.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        shard: Shard,
        *,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, shard, norm)
        part = ColumnPart(*shard.part(intermediate_size), intermediate_size)
        self.up_proj = MergedColumnParallelLinear(hidden_size, (part,), shard, names=("up_proj",))

    @property
    def input_form(self) -> RowForm | None:
        return self.up_proj.input_form

    def _activated(self, x: Rows) -> Rows:
        return ops.relu_squared(self.up_proj(x))

    def _plain_input(self, form: GateForm | None) -> Tensor | None:
        is_form = form is not None and form.kind == "relu_squared"
        return self.up_proj.method.plain_weight(self.up_proj) if is_form else None

    def checkpoint_weights(self, prefix: str, *, is_fused: bool) -> Iterator[CheckpointWeight]:
        yield from self.up_proj.checkpoint_weights(f"{prefix}.up_proj")
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")
