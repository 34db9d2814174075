"""Which quantised weights we can compute with: of each scheme its format and its methods.

A new scheme is a `WeightFormat`, by which every device can serve it in plain numbers, and a line
here. A method that computes with the quantised numbers themselves is chosen by a factory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.contracts.errors import CannotStartError
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import LinearMethod, LinearShare
from engine.layers.methods.formats.fp4_format import fp4_format
from engine.layers.methods.formats.fp8_format import Fp8Format
from engine.layers.methods.formats.integer_format import IntegerFormat
from engine.layers.methods.formats.mxfp8_format import Mxfp8Format
from engine.layers.methods.formats.weight_format import Dequantised, WeightFormat
from engine.layers.methods.quantised.fp4_linear import fp4_linear
from engine.layers.methods.quantised.fp8_linear import fp8_linear
from engine.layers.methods.quantised.int4_linear import int4_linear
from engine.layers.methods.quantised.int8_linear import int8_linear
from engine.quantization import (
    Fp8Scheme,
    Int4Scheme,
    Int8Scheme,
    Mxfp4Scheme,
    Mxfp8Scheme,
    Nvfp4Scheme,
    Scheme,
)

FORMATS: dict[type[Any], Callable[[Any], WeightFormat | None]] = {
    Fp8Scheme: Fp8Format,
    Int4Scheme: IntegerFormat,
    Int8Scheme: IntegerFormat,
    Mxfp4Scheme: fp4_format,
    Mxfp8Scheme: Mxfp8Format,
    Nvfp4Scheme: fp4_format,
}
"""Formats of matrices, by scheme; None: the scheme is not one of single matrices."""

LinearFactory = Callable[[Any, LinearMethod, LinearShare, GemmPolicy], LinearMethod | None]
"""Is given scheme, method of plain weights, share and policy of the device; returns a method for
them, or None: dequantise."""

LINEAR: dict[type[Any], LinearFactory] = {
    Fp8Scheme: fp8_linear,
    Int4Scheme: int4_linear,
    Int8Scheme: int8_linear,
    Mxfp4Scheme: fp4_linear,
    Nvfp4Scheme: fp4_linear,
}
"""Methods that compute with quantised numbers, by scheme."""


class UnsupportedScheme(CannotStartError):
    """A layer is quantised in a way that nothing here computes."""


def weight_format(scheme: Scheme, name: str) -> WeightFormat:
    """Returns how matrices of a scheme are stored. Raises `UnsupportedScheme` about `name`."""
    form = FORMATS[type(scheme)](scheme)
    if form is None:
        kind = type(scheme).__name__.removesuffix("Scheme").upper()
        raise UnsupportedScheme(
            f"{name} is quantised as {kind}, which is not supported for this layer: use another "
            "checkpoint of the model"
        )
    return form


def quantised_linear(
    scheme: Scheme | None, plain: LinearMethod, share: LinearShare, policy: GemmPolicy
) -> LinearMethod:
    """Returns the method of a layer; `plain` where its weights are plain."""
    if scheme is None:
        return plain
    factory = LINEAR.get(type(scheme))
    method = None if factory is None else factory(scheme, plain, share, policy)
    return method or Dequantised(plain, weight_format(scheme, share.name))


def format_of(scheme: Scheme | None, name: str) -> WeightFormat | None:
    """Returns how a matrix is stored; None: plainly. Raises `UnsupportedScheme` about `name`."""
    return None if scheme is None else weight_format(scheme, name)
