"""Linear layers with adapters: what they give without, and what an adapter of each token adds.

    x ─┬─ the layer as it is ────────────────────(+)─▶
       └─ A of the token's slot ─ B of its slot ──┘

A step in which no request has an adapter computes exactly what it would without any of this: the
inner method does it all. Ranks add their parts in front of the layer's sum over ranks: column
layers have A whole and B cut, row layers A cut and B whole, and the sum is linear. Sources: Hu et
al., LoRA (arXiv 2106.09685); Chen et al., Punica (arXiv 2310.18547) for adapters side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import DeviceConfig
from engine.layers.methods.base import HeadPlaces, LinearLayer, LinearMethod, Wrapped
from engine.layers.rows import RowForm, Rows, UnnormedRows, UnscaledProduct
from engine.layers.side_stream import SideStream, is_recording, side_stream
from tandem_kernels import ops
from tandem_kernels.device import has_warpgroup_mma, supports_pdl
from tandem_kernels.lora import lora_gemm_shapes
from tandem_kernels.lora.lora_tiles import MOST_PIECES

_FEW_ROWS = 16
"""The largest number of rows: with more, nothing has timed other forms than two launches."""
_PIECES_BESIDE = 4
"""Beside a GEMM the shrink has time, and the expand has fewer sums to load."""


@dataclass(slots=True)
class AdapterTokens:
    """Tells all layers which adapters the tokens of this pass have.

    Attributes:
        slots: [T] int32, -1: none; None: no token has any.
    """

    slots: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """Says how adapters are computed; without anything, by two launches for any number of rows.

    Attributes:
        few_rows: At most this many rows take an expand for few rows, which gate·up's activation is
            part of. Where a graph is recorded, their shrink is on a stream of its own beside the
            layer's GEMM.
        one_launch_rows: At most this many are computed in the launch of their layer instead, where
            that takes its weights: not quantised ones, nor many slots of high rank.
    """

    few_rows: int = 0
    one_launch_rows: int = 0

    @classmethod
    def choose(cls, config: DeviceConfig, device: torch.device) -> AdapterForm:
        """Returns the fastest form of a device that `config` allows."""
        if device.type != "cuda" or config.deterministic or not supports_pdl(device):
            return cls()
        # Its tiles want the shared memory of Hopper.
        one_launch = config.allows("lora-gemm") and has_warpgroup_mma(device)
        beside = config.allows("side-stream")
        if beside:
            side_stream(device)
        return cls(_FEW_ROWS if beside else 0, _FEW_ROWS if one_launch else 0)


_TWO_LAUNCHES = AdapterForm()


class WithAdapters(Wrapped):
    """Does what `inner` does, and adds what adapters make of the input.

    Args:
        a: [slots, P * r, in] for the layer's P projections, which lie behind each other.
        b: [slots, out, r].
        ends: Where the outputs of each projection end.
        counters: [`num_counters(out)`] int32 zeros, of this layer alone.
        fixed_order: A row's bits do not depend on the others.
    """

    def __init__(
        self,
        inner: LinearMethod,
        tokens: AdapterTokens,
        a: Tensor,
        b: Tensor,
        ends: tuple[int, ...],
        counters: Tensor,
        *,
        fixed_order: bool,
        form: AdapterForm = _TWO_LAUNCHES,
    ) -> None:
        super().__init__(inner, form.few_rows)
        self.tokens = tokens
        self.a, self.b, self.ends = a, b, ends
        self.counters = counters
        self.fixed_order = fixed_order
        self.form = form

    def plain_weight(self, layer: LinearLayer) -> Tensor | None:
        """Returns no weight [out, in]: adapters of this step may add to what it gives."""
        return None

    @property
    def input_form(self) -> RowForm | None:  # type: ignore[override]
        """Returns `inner`'s; adapters read plain rows."""
        return self.inner.input_form if self.tokens.slots is None else None

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self.apply_rows(layer, x)

    def apply_rows(self, layer: LinearLayer, x: Rows) -> Tensor:
        slots = self.tokens.slots
        if slots is None:
            return self.inner.apply_rows(layer, x)
        assert isinstance(x, Tensor)
        if self._takes(layer, x):
            return ops.lora_gemm(
                x, layer.weight, layer.bias, self.a, self.b, slots, self.ends, self.counters
            )
        shrunk, out = self._halves(layer, x, slots)
        if len(x) <= self.rows:
            ops.lora_expand_few(shrunk, self.b, slots, self.ends, out)
        else:
            ops.lora_expand(shrunk, self.b, slots, self.ends, out, fixed_order=self.fixed_order)
        return out

    def _halves(self, layer: LinearLayer, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what A makes of the rows, and what the layer does without adapters."""
        pieces = _PIECES_BESIDE if len(x) <= self.rows else MOST_PIECES

        def shrink() -> Tensor:
            return ops.lora_shrink(
                x, self.a, slots, fixed_order=self.fixed_order, most_pieces=pieces
            )

        if len(x) > self.rows or not is_recording(x):
            return shrink(), self.inner.apply(layer, x)
        side = SideStream(x.device)
        with side.beside():
            shrunk = shrink()
        out = self.inner.apply(layer, x)
        side.join()
        return shrunk, out

    def _takes(self, layer: LinearLayer, x: Tensor) -> bool:
        """Returns whether one launch computes the layer and its adapters."""
        return (
            len(x) <= self.form.one_launch_rows
            and layer.scheme is None
            and lora_gemm_shapes.takes(x, layer.weight, self.a, self.ends)
        )

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self.tokens.slots is None:
            return self.inner.gate_up(layer, x)
        return self._activated(layer, x, is_gelu=False)

    def gate_up_rows(
        self, layer: LinearLayer, x: Rows, form: RowForm | None, is_gelu: bool
    ) -> Rows:
        if self.tokens.slots is None:
            return self.inner.gate_up_rows(layer, x, form, is_gelu)
        assert isinstance(x, Tensor)
        return self._activated(layer, x, is_gelu=is_gelu)

    def _activated(self, layer: LinearLayer, x: Tensor, *, is_gelu: bool) -> Tensor:
        slots = self.tokens.slots
        if slots is not None and layer.bias is None and self._takes(layer, x):
            return ops.lora_gate_up(
                x, layer.weight, self.a, self.b, slots, self.counters, is_gelu=is_gelu
            )
        if slots is not None and len(x) <= self.rows:
            shrunk, both = self._halves(layer, x, slots)
            return ops.lora_expand_gated(shrunk, self.b, slots, both, is_gelu=is_gelu)
        both = self.apply_rows(layer, x)
        return ops.gelu_tanh_and_mul(both) if is_gelu else ops.silu_and_mul(both)

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        return self.tokens.slots is None and self.inner.add_to(layer, x, residual)

    def project_heads(
        self, layer: LinearLayer, x: Rows | UnnormedRows, places: HeadPlaces
    ) -> Tensor | None:
        if self.tokens.slots is None:
            return self.inner.project_heads(layer, x, places)
        return None

    def unscaled(self, layer: LinearLayer, x: Rows) -> Tensor | UnscaledProduct:
        if self.tokens.slots is None:
            return self.inner.unscaled(layer, x)
        return self.apply_rows(layer, x)

    def accumulate(self, layer: LinearLayer, x: Rows, out: Tensor) -> None:
        if self.tokens.slots is None:
            self.inner.accumulate(layer, x, out)
        else:
            out.add_(self.apply_rows(layer, x))
