"""The variants that `bench.engine.step_variants` tries, and how one is put in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import GateUpParallelLinear, RowParallelLinear
from engine.models.llama import LlamaForCausalLM, LlamaMLP
from tandem_kernels import decode_attention, device, narrow_linear, ops, prefill_attention
from tandem_kernels.decode_attention import DecodeTuning
from tandem_kernels.narrow_linear import NarrowTuning
from tandem_kernels.prefill_attention import PrefillTuning

DECODE_CASES = (
    (16, 1088), (1, 1088), (64, 1088), (256, 1088), (4, 1088), (8, 1088), (32, 1088), (32, 8192),
)  # fmt: skip
"""Requests, and the context of each."""


@dataclass(frozen=True, slots=True)
class Variant:
    """None: as it is. `library`: no products by kernels of ours. `residual_rows`: rows from which
    row layers add to the residual; `gated_rows`: those from which gate·up and its activation are
    one product; `mlp_rows`: rows that an MLP computes at a time; `blas`: the library of products;
    `long_chains`: small kernels start early in long steps, too."""

    name: str
    decode: DecodeTuning | None = None
    plain: NarrowTuning | None = None
    gated: NarrowTuning | None = None
    prefill: PrefillTuning | None = None
    library: bool = False
    chained: bool = True
    deterministic: bool = False
    residual_rows: int | None = None
    gated_rows: int | None = None
    mlp_rows: int | None = None
    blas: str | None = None
    long_chains: bool = False


_NEVER = 0
_ALWAYS = 1
_ANY_ROWS = 1 << 30

_PREFILL = [
    (128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 5), (64, 64, 4, 3), (128, 64, 8, 5),
    (128, 128, 8, 5),
]  # fmt: skip
"""Rows, tile, warps, stages."""

_DECODE = [
    (64, 4, 5, 1), (64, 2, 3, 4), (32, 2, 5, 4), (64, 4, 3, 3), (128, 4, 3, 2), (64, 4, 5, 2),
]  # fmt: skip
"""Tile, warps, stages, programs on an SM."""

_PLAIN = [(64, 128, 4, 5), (32, 256, 4, 5), (32, 128, 4, 8)]
_GATED = [(64, 128, 8, 5), (32, 128, 4, 5), (64, 128, 4, 4)]
"""Outputs, depth, warps, stages."""


def decode_variants() -> list[Variant]:
    return [Variant(f"decode {given}", decode=DecodeTuning(*given)) for given in _DECODE]


def prefill_variants() -> list[Variant]:
    return [Variant(f"triton {given}", prefill=PrefillTuning(*given)) for given in _PREFILL]


def narrow_variants() -> list[Variant]:
    plain = [Variant(f"qkv {given}", plain=NarrowTuning(*given)) for given in _PLAIN]
    gated = [Variant(f"gate_up {given}", gated=NarrowTuning(*given)) for given in _GATED]
    return plain + gated


def whole_steps() -> list[Variant]:
    """Other ways for everything at once."""
    return [
        Variant("products by the library", library=True),
        Variant("products by the library, not chained", library=True, chained=False),
        Variant("not chained", chained=False),
        Variant("deterministic", deterministic=True),
        Variant("present again"),
    ]


def long_prompt_variants() -> list[Variant]:
    """Of steps with thousands of tokens."""
    return [
        Variant("present"),
        Variant("norms add", residual_rows=_NEVER),
        Variant("activation apart", gated_rows=_NEVER),
        Variant("MLP by 4096", residual_rows=_ALWAYS, mlp_rows=4096),
        Variant("cuBLASLt", blas="cublaslt"),
        Variant("chained", long_chains=True),
    ]


@contextmanager
def applied(variant: Variant, model: LlamaForCausalLM) -> Iterator[None]:
    """The model computes this way until the end of the block."""
    layers = [module for module in model.modules() if hasattr(module, "narrow_rows")]
    before = [layer.narrow_rows for layer in layers]
    row_layers = [module for module in model.modules() if isinstance(module, RowParallelLinear)]
    residual_rows = row_layers[0].residual_rows
    own = narrow_linear.narrow_tuning
    tunings = {
        (narrow_linear, "narrow_tuning"): lambda gated: (
            (variant.gated if gated else variant.plain) or own(gated)
        ),
        (decode_attention, "decode_tuning"): lambda *_: variant.decode,
        (prefill_attention, "prefill_tuning"): lambda *_: variant.prefill,
    }
    chosen = (variant.plain or variant.gated, variant.decode, variant.prefill)
    device.chain_launches(variant.chained)
    _set_deterministic(model, variant.deterministic)
    if variant.library or variant.deterministic:
        for layer in layers:
            layer.narrow_rows = 0  # type: ignore[assignment]
    if variant.deterministic or variant.residual_rows is not None:
        _set_residual_rows(row_layers, variant.residual_rows or _NEVER)
    try:
        with ExitStack() as patches:
            for (module, name), tuning in zip(tunings, chosen, strict=True):
                if tuning is not None:
                    patches.enter_context(patch.object(module, name, tunings[module, name]))
            for layer in _gated_layers(model, variant):
                rows = variant.gated_rows or _NEVER
                patches.enter_context(patch.object(layer, "gated_rows", rows))
            if variant.blas is not None:
                torch.backends.cuda.preferred_blas_library(variant.blas)
            if variant.long_chains:
                patches.enter_context(patch.object(device, "MAX_ROWS", _ANY_ROWS))
            if variant.mlp_rows is not None:
                by_parts = _mlp_by_parts(variant.mlp_rows)
                patches.enter_context(patch.object(LlamaMLP, "forward", by_parts))
            yield
    finally:
        device.chain_launches(True)
        if variant.blas is not None:
            torch.backends.cuda.preferred_blas_library("default")
        _set_deterministic(model, False)
        _set_residual_rows(row_layers, residual_rows)
        for layer, rows in zip(layers, before, strict=True):
            layer.narrow_rows = rows


def _set_deterministic(model: LlamaForCausalLM, enabled: bool) -> None:
    for layer in model.modules():
        if hasattr(layer, "product"):
            layer.product = ops.invariant_linear if enabled else F.linear
    model.lm_head.deterministic = enabled


def _gated_layers(model: LlamaForCausalLM, variant: Variant) -> list[GateUpParallelLinear]:
    """Those that compute as `variant.gated_rows` says."""
    if variant.gated_rows is None and not (variant.library or variant.deterministic):
        return []
    return [module for module in model.modules() if isinstance(module, GateUpParallelLinear)]


def _set_residual_rows(layers: list[RowParallelLinear], rows: int) -> None:
    for layer in layers:
        layer.residual_rows = rows


def _mlp_by_parts(rows: int) -> Callable[[LlamaMLP, Tensor, Tensor], None]:
    """What lies between its products stays in the cache when there is little of it."""

    def forward(self: LlamaMLP, x: Tensor, residual: Tensor) -> None:
        for part, to in zip(x.split(rows), residual.split(rows), strict=True):
            self.down_proj.add(self.gate_up_proj(part), to)

    return forward
