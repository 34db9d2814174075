"""The variants that `bench.step_variants` tries, and how one is put in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch.nn.functional as F
from torch import nn

from engine.models.llama import LlamaForCausalLM
from tandem_kernels import decode_attention, device, narrow_linear, ops
from tandem_kernels.decode_attention import DecodeTuning
from tandem_kernels.narrow_linear import NarrowTuning
from tandem_kernels.narrow_shapes import MAX_ROWS

DECODE_BATCHES = (16, 1, 64, 256)
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


_DECODE = [
    (64, 4, 5, 1), (64, 2, 3, 4), (32, 2, 5, 4), (64, 4, 3, 2), (64, 4, 5, 2), (32, 4, 5, 3),
    (64, 4, 3, 3), (128, 4, 3, 2), (128, 8, 3, 1), (32, 2, 7, 3),
]  # fmt: skip
"""Tile, warps, stages, programs on an SM."""

_NARROW = {
    "qkv": [
        (16, 256, 1, 4, 4), (32, 128, 1, 4, 5), (32, 256, 1, 4, 4), (32, 256, 1, 8, 4),
        (64, 128, 1, 4, 5), (32, 512, 1, 8, 3),
    ],
    "o": [
        (32, 256, 2, 4, 4), (32, 256, 4, 4, 4), (64, 128, 4, 4, 5), (64, 128, 8, 4, 5),
        (64, 256, 4, 8, 4), (128, 128, 8, 8, 4),
    ],
    "gate_up": [
        (32, 128, 1, 4, 5), (32, 256, 1, 4, 3), (64, 128, 1, 4, 4), (64, 128, 1, 8, 5),
        (16, 256, 1, 4, 4), (32, 128, 1, 8, 6),
    ],
    "down": [
        (32, 256, 2, 4, 4), (32, 256, 4, 4, 4), (64, 128, 4, 4, 5), (64, 128, 8, 4, 5),
        (64, 256, 4, 8, 4), (128, 128, 8, 8, 4),
    ],
}  # fmt: skip
"""Outputs, depth, parts, warps, stages."""


def decode_variants() -> list[Variant]:
    return [Variant(f"decode {given}", decode=DecodeTuning(*given)) for given in _DECODE]


def narrow_variants() -> dict[str, list[Variant]]:
    """Each with one product of ours, chained."""
    return {
        product: [
            Variant(f"{product} {given}", None, ((product, NarrowTuning(*given)),), True)
            for given in tunings
        ]
        for product, tunings in _NARROW.items()
    }


def default_tuning(product: str) -> NarrowTuning:
    """What the kernels choose by themselves."""
    kind: narrow_linear.Kind = "partial"
    if product in ("qkv", "gate_up"):
        kind = "plain" if product == "qkv" else "gated"
    return narrow_linear.narrow_tuning(kind, 4096, 4096)


def combinations(decode: Variant, narrow: dict[str, Narrow], has_few_rows: bool) -> list[Variant]:
    """What was fastest alone, together. `narrow`: by product, with those that lost left out."""
    products = tuple(narrow.values())
    names = "+".join(narrow) or "none"
    no_asking = tuple((product, replace(how, ahead=0)) for product, how in products)
    more_asking = tuple((product, replace(how, ahead=512)) for product, how in products)
    everything = Variant("best", decode.decode, products, True)
    found = [Variant("chained, decode", decode.decode, (), True)]
    if has_few_rows:
        found += [
            Variant(
                f"decode, {size} MB ahead" + (", chained" if chained else ""),
                decode.decode,
                (),
                chained,
                size << 20,
            )
            for size, chained in ((4, False), (8, False), (4, True), (8, True))
        ]
        default = tuple((product, default_tuning(product)) for product in PRODUCTS)
        found.append(Variant("chained, decode, narrow as it is", decode.decode, default, True))
    if products and has_few_rows:
        found += [
            Variant(f"narrow {names}", None, products),
            replace(everything, name=f"chained, decode, narrow {names}"),
            replace(everything, name="the same, nothing asked for ahead", narrow=no_asking),
            replace(everything, name="the same, twice as much ahead", narrow=more_asking),
        ]
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

    ours = tuple(PRODUCTS[product] for product in how)
    layers = [module for name, module in model.named_modules() if ours and name.endswith(ours)]
    _set_narrow(layers, MAX_ROWS)
    _set_deterministic(model, variant.deterministic)
    device.chain_launches(variant.chained)
    device.ask_ahead(variant.ahead_bytes)
    try:
        with patch.object(narrow_linear, "narrow_tuning", narrow_tuning):
            if variant.decode is None:
                yield
            else:
                with patch.object(decode_attention, "decode_tuning", decode_tuning):
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
