"""Decides whether the KV cache is in FP8, and finds its scales.

    1. a file of scales, where a setting names one (`tandem calibrate-kv` writes it)
    2. those in the checkpoint, by any name that quantisers give them
    3. 1.0

Torch-free: both are known before a worker starts, because peers must have the same.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.config import KVCacheDtype, ModelConfig
from engine.contracts.errors import CannotStartError
from engine.kv_scales import HeadScales, KVScaleTable
from engine.models.errors import CheckpointError
from engine.models.files.stored_tensors import StoredTensor
from engine.models.files.weight_files import WeightFiles
from engine.models.identity import model_hash_of

_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|mla_attn\.|qkv_proj\.)?(?P<kind>k|v|kv|q|prob)_scale"
    r"|(?P<of>k|v|q)_proj\.(?P<what>output_scale|k_scale|v_scale|q_scale))$"
)
"""Quantisers' names of scales: vLLM's and compressed-tensors' first, then those that lie beside a
projection, as ModelOpt writes them. Scales of queries and of weights of attention are for kernels
that multiply in FP8, and are not used."""

_FORMATS = {"F32": "f", "F16": "e", "F64": "d", "BF16": "H"}
_SMALLEST, _LARGEST = 1e-20, 1e20
"""Scales beyond would make zeros or infinities of all numbers."""
FILE_FORMAT = "tandem-kv-scales/1"


class KVCacheDtypeError(CannotStartError):
    """The model cannot have the KV cache that the settings ask for. Names both, and the cure."""


class ScaleFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Describes a file of scales, which is JSON.

    Attributes:
        model_hash: Of the checkpoint that they were found for.
        k, v: By layer, one number or one for each KV head.
    """

    format: str
    model_hash: str
    k: list[list[float]]
    v: list[list[float]]


def choose_kv_scales(
    model: ModelConfig, wanted: KVCacheDtype, file: Path | None = None
) -> KVScaleTable | None:
    """Returns the scales of an FP8 cache; None: the cache is in the model's dtype.

    Args:
        wanted: `auto`: FP8 where the checkpoint says so.
        file: Of scales, instead of the checkpoint's.

    Raises:
        KVCacheDtypeError: This model cannot have it.
        CheckpointError: Scales cannot be read, or are none.
    """
    recommended = model.quantization is not None and model.quantization.kv_cache == "fp8"
    if wanted == "bfloat16" and model.dtype != "bfloat16":
        raise KVCacheDtypeError(
            f"--kv-cache-dtype bfloat16, but {model.path} is computed in {model.dtype}: an "
            "unquantised cache has the model's dtype; choose auto, fp8, or --dtype bfloat16"
        )
    if wanted == "bfloat16" or (wanted == "auto" and not recommended):
        if file is not None:
            raise KVCacheDtypeError(
                "--kv-cache-scales are for an FP8 cache; choose --kv-cache-dtype fp8"
            )
        return None
    if any(kv.narrow_planes for kv in model.kv_layers):
        _check_widths(model)
        if file is not None:
            raise KVCacheDtypeError(
                f"a file of scales, but an FP8 cache of {model.path} has an exponent beside each "
                "64 numbers; leave --kv-cache-scales away"
            )
        return KVScaleTable(source="of each 64 numbers, beside them", beside=True)
    if file is not None:
        return _from_file(model, file)
    if model.load_format == "dummy":
        return KVScaleTable(source="1.0, as weights are random")
    return _from_checkpoint(model)


def _check_widths(model: ModelConfig) -> None:
    """Raises `KVCacheDtypeError` where exponents would lie askew behind numbers."""
    for kv in model.kv_layers:
        if kv.narrow_planes and kv.narrow_planes[0].row_bytes % 8:
            raise KVCacheDtypeError(
                f"an FP8 KV cache, but {model.path} has {kv.narrow_planes[0].row_bytes} numbers of "
                "a vector that do not rotate, which is no multiple of 8; choose --kv-cache-dtype "
                "bfloat16"
            )


def is_kv_scale(name: str) -> bool:
    """Returns whether a tensor of a checkpoint is a scale of its KV cache."""
    return _NAME.match(name) is not None


def _from_file(model: ModelConfig, path: Path) -> KVScaleTable:
    cure = "write it anew with `tandem calibrate-kv`"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ScaleFile)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})", cure) from error
    except msgspec.DecodeError as error:
        raise CheckpointError(path, f"holds no scales of a KV cache ({error})", cure) from error
    if found.format != FILE_FORMAT:
        raise CheckpointError(path, f"has format {found.format!r}, not {FILE_FORMAT!r}", cure)
    if found.model_hash != model_hash_of(model):
        fault = f"was written for another checkpoint than {model.path}, or another quantization"
        raise CheckpointError(path, fault, cure)
    if not len(found.k) == len(found.v) == model.num_layers:
        raise CheckpointError(path, f"has not the model's {model.num_layers} layers", cure)
    k, v = (
        tuple(_checked(path, f"layer {i}", scales, model, i) for i, scales in enumerate(layers))
        for layers in (found.k, found.v)
    )
    return KVScaleTable(k=k, v=v, source=f"of {path}")


def _from_checkpoint(model: ModelConfig) -> KVScaleTable:
    found: dict[str, dict[int, HeadScales]] = {"k": {}, "v": {}}
    for tensor in _by_preference(WeightFiles(Path(model.path)).tensors.values()):
        match = _NAME.match(tensor.name)
        assert match is not None
        layer = int(match["layer"])
        scales = _checked(tensor.file, tensor.name, _numbers(tensor), model, layer)
        kind = match["kind"] or match["of" if match["what"] == "output_scale" else "what"]
        kind = kind.removesuffix("_scale")
        for one in ("k", "v") if kind == "kv" else (kind,):
            if one in found:
                found[one].setdefault(layer, scales)
    count = len(found["k"].keys() | found["v"].keys())
    if count == 0:
        return KVScaleTable(source="1.0, as the checkpoint has none")
    k, v = (
        tuple(of_kind.get(layer, (1.0,)) for layer in range(model.num_layers))
        for of_kind in found.values()
    )
    return KVScaleTable(k=k, v=v, source=f"of the checkpoint, for {count} of {len(k)} layers")


def _by_preference(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Returns scales, those of one kind alone before those of both, and of outputs last."""
    scales = [tensor for tensor in tensors if is_kv_scale(tensor.name)]
    return sorted(scales, key=lambda tensor: tensor.name.endswith(("output_scale", "kv_scale")))


def _numbers(tensor: StoredTensor) -> list[float]:
    size = tensor.stop - tensor.start
    kind = _FORMATS.get(tensor.dtype)
    if kind is None or not 0 < size <= 1 << 20:
        raise CheckpointError(
            tensor.file, f"has {tensor.name} in {tensor.dtype}, {size} bytes", "download it again"
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        stored = file.read(size)
    numbers = struct.unpack(f"<{size // struct.calcsize(kind)}{kind}", stored)
    if tensor.dtype == "BF16":
        upper = b"".join(struct.pack("<HH", 0, number) for number in numbers)
        numbers = struct.unpack(f"<{len(numbers)}f", upper)
    return list(numbers)


def _checked(
    place: Path, name: str, scales: list[float], model: ModelConfig, layer: int
) -> HeadScales:
    """Returns the numbers as float32 has them. Raises `CheckpointError` for what is no scale."""
    is_latent = any(plane.name == "latent" for kv in model.kv_layers for plane in kv.planes)
    num_heads = 1 if is_latent else model.heads_of(min(layer, model.num_layers - 1)).num_kv_heads
    if len(scales) not in (1, num_heads):
        raise CheckpointError(
            place,
            f"has {len(scales)} scales as {name}, for {num_heads} KV heads",
            "a scale is for all heads of a layer or for one",
        )
    for scale in scales:
        if not _SMALLEST <= scale <= _LARGEST:
            raise CheckpointError(
                place,
                f"has {scale} as {name}",
                f"a scale of a KV cache is a number from {_SMALLEST} to {_LARGEST}",
            )
    return struct.unpack(f"<{len(scales)}f", struct.pack(f"<{len(scales)}f", *scales))
