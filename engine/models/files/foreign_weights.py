"""Recognises weights that tandem does not read, to call them by their name in an error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_PACKERS = {
    ".weight._data": "optimum-quanto packs them",  # 0.2.7: qint8; its config.json says nothing
    ".W_q": "HQQ packs them",  # 0.2.8: `save_to_safetensors`; its config.json says nothing
    "_weight_qdata": "torchao packs them",
    ".absmax": "bitsandbytes packs them",
    ".SCB": "bitsandbytes packs them",
    ".qweight": "GPTQ and AWQ pack them",
    ".weight_packed": "compressed-tensors packs them",
}
"""Maps ends of tensors' names to the tool that packs weights under them."""
_KINDS = {
    "qmodel.pt": "HQQ's own, pickled",
    "*.tensors": "tensorizer's",
    "*.bin": "pickled",
    "*.pt": "pickled",
    "*.pth": "pickled",
    "*.gguf": "GGUF",
    "*.npz": "arrays of NumPy or MLX",
    "*.onnx": "ONNX",
    "*.msgpack": "Flax",
    "*.h5": "TensorFlow",
    "*.engine": "TensorRT",
}
"""Files of weights, the most telling first."""


def packed_by(names: Iterable[str]) -> str:
    """Returns what packs weights under one of these names, as a clause; "": unknown."""
    ends = {end for name in names for end in _PACKERS if name.endswith(end)}
    return next((_PACKERS[end] for end in _PACKERS if end in ends), "")


def other_weights(folder: Path) -> str:
    """Returns a file of weights in another format, and which; "": there is none."""
    for pattern, kind in _KINDS.items():
        for path in sorted(folder.glob(pattern)):
            return f"{path.name} ({kind})"
    return ""
