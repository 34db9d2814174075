"""Finds out what a checkpoint says of its quantisation, in config.json or beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.config import QuantizationName
from engine.models.config.json_file import read_json
from engine.models.config.wrappers import with_own_names
from engine.models.errors import CheckpointError
from engine.models.quantization.auto_round import read_auto_round
from engine.models.quantization.compressed_tensors import read_compressed_tensors
from engine.models.quantization.fields import Fields
from engine.models.quantization.fp8 import ONLINE, read_fp8, read_mxfp8
from engine.models.quantization.modelopt.modelopt import read_modelopt
from engine.models.quantization.packed import read_awq, read_gptq, read_mxfp4
from engine.models.quantization.quark import read_quark
from engine.quantization import Quantization

READERS: dict[str, Callable[[Fields], Quantization]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "intel/auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "mxfp8": read_mxfp8,
    "quark": read_quark,
}
"""The only list, by `quant_method` of config.json."""

_MODELOPT_FILE = "hf_quant_config.json"


class _ModelOptFile(msgspec.Struct):
    quantization: dict[str, object] = {}


def read_quantization(
    folder: Path,
    values: dict[str, object] | None,
    wanted: QuantizationName | None = None,
    place: str = "quantization_config",
) -> Quantization | None:
    """Returns the schemes of a checkpoint; None: its weights are plain.

    Args:
        values: What config.json says of them, if anything.
        wanted: What the operator says it is; `fp8` of a plain checkpoint: quantise it.
        place: The name of `values` in config.json.

    Raises:
        UnsupportedField: A field asks for what is not here, or is unknown.
        CheckpointError: The file beside config.json cannot be read, or the checkpoint is not as
            wanted.
    """
    found = _published(folder, values, place)
    method = "" if found is None else found.method
    if wanted is None or wanted == method:
        return found
    if wanted == "fp8" and found is None:
        return ONLINE
    raise CheckpointError(
        folder / "config.json",
        f"says that weights are quantised by {method or 'nothing'}, but --quantization is {wanted}",
        "leave --quantization away; fp8 quantises plain checkpoints",
    )


def _sized(folder: Path, values: dict[str, object]) -> dict[str, object]:
    """Returns what is said of a quantisation, with the size of groups that ModelOpt says of AWQ in
    its own file alone."""
    path = folder / _MODELOPT_FILE
    if "quant_algo" not in values or "group_size" in values or not path.is_file():
        return values
    own = read_json(path, _ModelOptFile).quantization
    is_same = own.get("quant_algo") == values["quant_algo"]
    return values | {"group_size": own.get("group_size")} if is_same else values


def _published(folder: Path, values: dict[str, object] | None, place: str) -> Quantization | None:
    if values is None:
        path = folder / _MODELOPT_FILE
        values = read_json(path, _ModelOptFile).quantization if path.is_file() else {}
        values = with_own_names(values)
        if not values:
            return None
        place, values = f"{_MODELOPT_FILE}: quantization", {"quant_method": "modelopt"} | values
    inner = values.get("quantization_config")
    if isinstance(inner, dict):  # Early llm-compressor wrote it so; transformers still reads it.
        place = f"{place}.quantization_config"
        values = {name: value for name, value in values.items() if value is not inner} | inner
    fields = Fields(place, _sized(folder, values))
    if {"bits", "group_size"} <= values.keys() and not fields.has("quant_method"):
        mode = fields.get("mode", str, "affine")
        raise fields.refused("mode", f"weights as MLX packs them ({mode})")
    method = fields.get("quant_method", str, _unnamed(fields)).lower()
    if method not in READERS:
        raise fields.refused("quant_method", f"weights quantised by {method!r}")
    quantization = READERS[method](fields)
    fields.finish()
    return quantization


def _unnamed(fields: Fields) -> str:
    """Returns a method that was left out, as converters of ModelOpt 0.29 to 0.31 do, and as early
    releases of transformers did for bitsandbytes; "": unknown."""
    if fields.has("load_in_4bit") or fields.has("load_in_8bit"):
        return "bitsandbytes"
    return "modelopt" if fields.has("quant_algo") else ""
