"""Reads what compressed-tensors says of floats in small groups: NVFP4, MXFP4 and MXFP8."""

from __future__ import annotations

from engine.models.quantization.fields import Fields
from engine.quantization import Mxfp4Scheme, Mxfp8Scheme, Nvfp4Scheme

_FORMATS = {
    "nvfp4-pack-quantized": (4, "tensor_group", 16),
    "mxfp4-pack-quantized": (4, "group", 32),
    "mxfp8-quantized": (8, "group", 32),
}
"""Maps the format of a group to bits, strategy and size of its groups of weights."""
MICRO_FORMATS = tuple(_FORMATS)
MICRO_SCALE_TYPES = ("e4m3", "uint8")


def read_micro_floats(
    weights: Fields, bits: int, form: str
) -> Nvfp4Scheme | Mxfp4Scheme | Mxfp8Scheme:
    """Reads a group's weights; `form` says how they are stored. Whatever a GEMM's inputs are meant
    to be, they stay in the model's dtype."""
    if form not in _FORMATS:
        raise weights.refused("num_bits", f"floats of {bits} bits stored as {form!r}")
    known = weights.word("strategy"), weights.get("group_size", int, -1)
    if (bits, *known) != _FORMATS[form]:
        raise weights.refused(
            "group_size", f"floats of {bits} bits with scales per {known[0]!r} of {known[1]}"
        )
    weights.expect("symmetric", True)
    for name in ("block_structure", "actorder"):
        weights.expect(name)
    if form == "nvfp4-pack-quantized":
        return Nvfp4Scheme(layout="compressed-tensors")
    return Mxfp4Scheme("compressed-tensors") if bits == 4 else Mxfp8Scheme()
