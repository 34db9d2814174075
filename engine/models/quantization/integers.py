"""Reads what compressed-tensors says of integer weights, and of the inputs beside them."""

from __future__ import annotations

from typing import NamedTuple

from engine.models.quantization.fields import Fields
from engine.quantization import Activations, Int4Scheme, Int8Scheme, Integers

SCHEMES: dict[int, type[Int4Scheme] | type[Int8Scheme]] = {4: Int4Scheme, 8: Int8Scheme}
"""Maps bits to the class of their schemes."""
_UNPACKED = ("int-quantized", "naive-quantized")
_PACKED = "pack-quantized"


class Inputs(NamedTuple):
    """Says how a GEMM's inputs are quantised, as the publisher means it.

    Attributes:
        numbers: `int8`, `e4m3` or `e2m1`; empty: not at all.
    """

    activations: Activations = "none"
    numbers: str = ""
    symmetric: bool = True


def read_integers(weights: Fields, bits: int, form: str, inputs: Inputs) -> Integers:
    """Reads a group's weights of 4 or 8 bits; `form` says how they are stored."""
    strategy = weights.word("strategy")
    group_size = weights.get("group_size", int, -1)
    if strategy not in ("group", "channel", "tensor"):
        raise weights.refused("strategy", f"{bits}-bit weights with scales per {strategy!r}")
    if strategy == "group" and group_size < 1:
        raise weights.refused("group_size", f"groups of {group_size}")
    if bits == 8 and inputs.numbers == "e4m3":
        raise weights.refused("num_bits", "8-bit integers beside inputs in e4m3")
    if form == _PACKED:
        layout = "compressed-tensors"
    elif form in _UNPACKED:
        layout = "int-quantized"
    else:
        raise weights.refused("num_bits", f"{bits}-bit integers stored as {form!r}")
    is_reordered = weights.choice("actorder", False, "weight", "static", "group", True)
    return SCHEMES[bits](
        layout=layout,  # type: ignore[arg-type]
        group_size={"group": group_size, "channel": -1, "tensor": 0}[strategy],
        symmetric=weights.get("symmetric", bool, True),
        ordered_by_activation=is_reordered in ("group", True),
        activations=inputs.activations if inputs.symmetric else "none",
        activation_numbers=inputs.numbers,
    )
