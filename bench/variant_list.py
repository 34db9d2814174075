"""The variants that `bench.step_variants` tries, and how one is put in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch.nn.functional as F
from torch import nn

from engine.models.llama import LlamaForCausalLM
from tandem_kernels import decode_attention, device, narrow_linear, ops, prefill_attention
from tandem_kernels.decode_attention import DecodeTuning
from tandem_kernels.narrow_linear import NarrowTuning
from tandem_kernels.narrow_shapes import MAX_ROWS
from tandem_kernels.prefill_attention import PrefillTuning

DECODE_CASES = (
    (16, 1088),
    (1, 1088),
    (64, 1088),
    (256, 1088),
    (4, 1088),
    (8, 1088),
    (32, 1088),
    (32, 8192),
)
"""Requests, and the context of each."""
NARROW_BATCHES = (16, 1)
PRODUCTS = {"qkv": "qkv_proj", "o": "o_proj", "gate_up": "gate_up_proj", "down": "down_proj"}
"""Short names, and the ends of the layers' names."""

Narrow = tuple[str, NarrowTuning]
"""Which product, and how."""


@dataclass(frozen=True, slots=True)
class Variant:
    """`narrow`: the products that kernels of ours compute. `decode`: None for the present one."""

    name: str
    decode: DecodeTuning | None = None
    narrow: tuple[Narrow, ...] = ()
    chained: bool = False
    ahead_bytes: int = 0
    deterministic: bool = False
    prefill: PrefillTuning | None = None
    merge_warps: int = decode_attention.MERGE_WARPS


_PREFILL = [(128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 4), (128, 64, 4, 4), (64, 128, 4, 4)]
"""Rows, tile, warps, stages."""

_DECODE = [
    (64, 4, 5, 1), (64, 2, 3, 4), (32, 2, 5, 4), (64, 4, 3, 3), (128, 4, 3, 2), (64, 4, 5, 2),
]  # fmt: skip
"""Tile, warps, stages, programs on an SM."""

_NARROW = {
    "qkv": [(32, 256, 1, 4, 4), (64, 128, 1, 4, 5), (32, 256, 1, 4, 5), (32, 128, 1, 4, 8)],
    "gate_up": [(32, 256, 1, 4, 3), (64, 128, 1, 8, 5), (32, 128, 1, 4, 5), (64, 128, 1, 4, 4)],
    "down": [(64, 128, 4, 4, 5), (32, 256, 2, 4, 4), (64, 128, 2, 4, 6), (64, 256, 4, 4, 3)],
    "o": [(64, 128, 4, 4, 5), (32, 256, 2, 4, 4), (64, 128, 2, 4, 5)],
}
"""Outputs, depth, parts, warps, stages."""


def decode_variants() -> list[Variant]:
    found = [Variant(f"decode {given}", decode=DecodeTuning(*given)) for given in _DECODE]
    return found + [Variant(f"merge by {warps} warps", merge_warps=warps) for warps in (1, 2)]


def prefill_variants() -> list[Variant]:
    return [Variant(f"triton {given}", prefill=PrefillTuning(*given)) for given in _PREFILL]


def narrow_variants() -> dict[str, list[Variant]]:
    """Each with one product of ours, chained."""
    return {
        product: [
            Variant(
                f"{product} {given}" + (" late" if late else ""),
                narrow=((product, NarrowTuning(*given, ahead=_ahead(late), late=late)),),
                chained=True,
            )
            for given in tunings
            for late in (False, True)
        ]
        for product, tunings in _NARROW.items()
    }


def _ahead(late: bool) -> int:
    """A kernel that lets the next one start late leaves it less time to ask."""
    return 512 if late else 256


_SUBSETS = (
    ("qkv",), ("qkv", "down"), ("qkv", "gate_up"), ("gate_up", "down"), ("qkv", "gate_up", "down"),
    ("qkv", "o", "gate_up", "down"),
)  # fmt: skip


def combinations(decode: Variant, narrow: dict[str, Narrow]) -> list[Variant]:
    """What was fastest alone, together. `narrow`: by product."""
    found = [Variant("chained, decode", decode.decode, (), True)]
    for megabytes in (4, 8):
        name = f"decode, {megabytes} MB ahead"
        found.append(Variant(name + ", chained", decode.decode, (), True, megabytes << 20))
    for products in _SUBSETS:
        tunings = tuple(narrow[product] for product in products)
        late, early = (
            tuple(
                (product, replace(how, ahead=_ahead(late), late=late)) for product, how in tunings
            )
            for late in (True, False)
        )
        name = "+".join(products)
        found.append(Variant(f"decode, narrow {name}, chained", decode.decode, tunings, True))
        found.append(Variant(f"decode, narrow {name}, all late", decode.decode, late, True))
        found.append(Variant(f"decode, narrow {name}, all early", decode.decode, early, True))
        if len(products) < 3:
            continue
        found.append(
            Variant(f"decode, narrow {name}, 8 MB ahead", decode.decode, late, True, 8 << 20)
        )
    return [*found, Variant("deterministic", deterministic=True), Variant("present again")]


@contextmanager
def applied(variant: Variant, model: LlamaForCausalLM) -> Iterator[None]:
    """The model computes this way until the end of the block."""
    how = dict(variant.narrow)

    def narrow_tuning(kind: narrow_linear.Kind, num_outputs: int, inner: int) -> NarrowTuning:
        if kind == "partial":
            return how["down" if inner > num_outputs else "o"]
        return how["gate_up" if kind == "gated" else "qkv"]

    def decode_tuning(*_: object) -> DecodeTuning:
        assert variant.decode is not None
        return variant.decode

    def prefill_tuning(*_: object) -> PrefillTuning:
        assert variant.prefill is not None
        return variant.prefill

    ours = tuple(PRODUCTS[product] for product in how)
    layers = [module for name, module in model.named_modules() if ours and name.endswith(ours)]
    _set_narrow(layers, MAX_ROWS)
    _set_deterministic(model, variant.deterministic)
    device.chain_launches(variant.chained)
    device.ask_ahead(variant.ahead_bytes)
    try:
        with ExitStack() as patches:
            patches.enter_context(patch.object(narrow_linear, "narrow_tuning", narrow_tuning))
            warps = variant.merge_warps
            patches.enter_context(patch.object(decode_attention, "MERGE_WARPS", warps))
            if variant.decode is not None:
                place = patch.object(decode_attention, "decode_tuning", decode_tuning)
                patches.enter_context(place)
            if variant.prefill is not None:
                place = patch.object(prefill_attention, "prefill_tuning", prefill_tuning)
                patches.enter_context(place)
            yield
    finally:
        device.chain_launches(False)
        device.ask_ahead(0)
        _set_deterministic(model, False)
        _set_narrow(layers, 0)


def _set_narrow(layers: list[nn.Module], rows: int) -> None:
    for layer in layers:
        layer.narrow_rows = rows  # type: ignore[assignment]


def _set_deterministic(model: LlamaForCausalLM, enabled: bool) -> None:
    for layer in model.modules():
        if hasattr(layer, "product"):
            layer.product = ops.invariant_linear if enabled else F.linear
    model.lm_head.deterministic = enabled
