"""The variants that `bench.step_variants` tries, and how one is put in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch.nn.functional as F

from engine.models.llama import LlamaForCausalLM
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
    """None: as it is. `library`: no products by kernels of ours."""

    name: str
    decode: DecodeTuning | None = None
    plain: NarrowTuning | None = None
    gated: NarrowTuning | None = None
    prefill: PrefillTuning | None = None
    library: bool = False
    chained: bool = True
    deterministic: bool = False


_PREFILL = [(128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 4), (128, 64, 4, 4), (64, 128, 4, 4)]
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


@contextmanager
def applied(variant: Variant, model: LlamaForCausalLM) -> Iterator[None]:
    """The model computes this way until the end of the block."""
    layers = [module for module in model.modules() if hasattr(module, "narrow_rows")]
    before = [layer.narrow_rows for layer in layers]
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
    try:
        with ExitStack() as patches:
            for (module, name), tuning in zip(tunings, chosen, strict=True):
                if tuning is not None:
                    patches.enter_context(patch.object(module, name, tunings[module, name]))
            yield
    finally:
        device.chain_launches(True)
        _set_deterministic(model, False)
        for layer, rows in zip(layers, before, strict=True):
            layer.narrow_rows = rows


def _set_deterministic(model: LlamaForCausalLM, enabled: bool) -> None:
    for layer in model.modules():
        if hasattr(layer, "product"):
            layer.product = ops.invariant_linear if enabled else F.linear
    model.lm_head.deterministic = enabled
