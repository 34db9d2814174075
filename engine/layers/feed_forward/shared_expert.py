"""The expert beside those of a mixture that every token goes to."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.layers.feed_forward.mlp import DenseMLP, GatedMLP, SquaredMLP
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.elementwise.gate_form import GateForm


class SharedExpert(nn.Module):
    """Computes the block that every token goes through.

    Args:
        has_gate: Its output counts by the sigmoid of a projection of the token.
        form: Of its activation; see `GateUpParallelLinear`.
        squared: It is a `SquaredMLP`.
    """

    gate: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        shard: Shard,
        *,
        has_gate: bool,
        form: GateForm | None = None,
        squared: bool = False,
    ) -> None:
        super().__init__()
        self.mlp: DenseMLP
        if squared:
            self.mlp = SquaredMLP(hidden_size, intermediate_size, shard)
        else:
            self.mlp = GatedMLP(hidden_size, intermediate_size, shard, gate=form)
        self.gate = shard.parameter(1, hidden_size) if has_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Computes this rank's part of the sum over ranks: `x` [T, H] -> [T, H]."""
        out = self.mlp.partial(x)
        return out if self.gate is None else ops.row_gate(out, x, self.gate)

    def ungated(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Returns what `forward` does, [T, H], in front of its gate, and that as `PairOutputs` has
        it."""
        return self.mlp.partial(x), self.gate_of(x)

    def gate_of(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns its gate for `x` [T, H] as `PairOutputs` has it."""
        return None if self.gate is None else (x, self.gate)

    def plain_weights(self, form: GateForm | None) -> tuple[Tensor, Tensor] | None:
        """Returns those of its block, [2 I, H] or [I, H] and [H, I]; see `DenseMLP`."""
        return self.mlp.plain_weights(form)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Adds what `forward` returns to `out`, [T, H]; in the GEMM where it can."""
        if self.gate is None:
            self.mlp.accumulate(x, out)
        else:
            out.add_(self(x))

    def checkpoint_weights(
        self, prefix: str, gate: str, *, is_fused: bool
    ) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `is_fused`: see `GatedMLP`."""
        yield from self.mlp.checkpoint_weights(prefix, is_fused=is_fused)
        if self.gate is not None:
            yield CheckpointWeight(gate, self.gate, tuple(self.gate.shape))
