"""Linear layers with adapters: what they give without, and what an adapter of each token adds.

    x ─┬─ the layer as it is ────────────────────(+)─▶
       └─ A of the token's slot ─ B of its slot ──┘

A step in which no request has an adapter computes exactly what it would without any of this: the
inner method does it all. Ranks add their parts in front of the layer's sum over ranks: column
layers have A whole and B cut, row layers A cut and B whole, and the sum is linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.distributed import ParallelGroup
from engine.layers.methods.base import LinearLayer, LinearMethod, LinearPart
from engine.layers.rows import Rows, UnscaledProduct
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops


@dataclass(slots=True)
class AdapterTokens:
    """Tells all layers which adapters the tokens of this pass have.

    Attributes:
        slots: [T] int32, -1: none; None: no token has any.
    """

    slots: Tensor | None = None


class WithAdapters(LinearMethod):
    """Does what `inner` does, and adds what adapters make of the input.

    Args:
        a: [slots, P * r, in] for the layer's P projections, which lie behind each other.
        b: [slots, out, r].
        ends: Where the outputs of each projection end.
        fixed_order: A row's bits do not depend on the others.
    """

    def __init__(
        self,
        inner: LinearMethod,
        tokens: AdapterTokens,
        a: Tensor,
        b: Tensor,
        ends: tuple[int, ...],
        *,
        fixed_order: bool,
    ) -> None:
        self.inner = inner
        self.tokens = tokens
        self.a, self.b, self.ends = a, b, ends
        self.fixed_order = fixed_order

    @property
    def input_group(self) -> int | None:  # type: ignore[override]
        """Returns `inner`'s; adapters read plain rows."""
        return self.inner.input_group if self.tokens.slots is None else None

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        self.inner.create(layer, num_outputs, num_inputs, bias, shard)

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        return self.inner.checkpoint_weights(layer, part)

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self.apply_rows(layer, x)

    def apply_rows(self, layer: LinearLayer, x: Rows) -> Tensor:
        slots = self.tokens.slots
        if slots is None:
            return self.inner.apply_rows(layer, x)
        assert isinstance(x, Tensor)
        shrunk = ops.lora_shrink(x, self.a, slots, fixed_order=self.fixed_order)
        out = self.inner.apply(layer, x)
        ops.lora_expand(shrunk, self.b, slots, self.ends, out, fixed_order=self.fixed_order)
        return out

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self.tokens.slots is None:
            return self.inner.gate_up(layer, x)
        return ops.silu_and_mul(self.apply_rows(layer, x))

    def gate_up_rows(self, layer: LinearLayer, x: Rows, group: int | None, is_gelu: bool) -> Rows:
        if self.tokens.slots is None:
            return self.inner.gate_up_rows(layer, x, group, is_gelu)
        both = self.apply_rows(layer, x)
        return ops.gelu_tanh_and_mul(both) if is_gelu else ops.silu_and_mul(both)

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        return self.tokens.slots is None and self.inner.add_to(layer, x, residual)

    def unscaled(self, layer: LinearLayer, x: Rows) -> Tensor | UnscaledProduct:
        if self.tokens.slots is None:
            return self.inner.unscaled(layer, x)
        return self.apply_rows(layer, x)

    def accumulate(self, layer: LinearLayer, x: Rows, out: Tensor) -> None:
        if self.tokens.slots is None:
            self.inner.accumulate(layer, x, out)
        else:
            out.add_(self.apply_rows(layer, x))

    def reduce(self, local: Tensor, group: ParallelGroup) -> Tensor:
        return self.inner.reduce(local, group)
