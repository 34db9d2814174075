"""Reads a LoRA adapter as PEFT saves it: which matrices there are, and what the adapter is.

    adapter_config.json          rank, scale, and what the adapter is beside plain LoRA
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight    [r, inputs]
                                 base_model.model.<module>.lora_B.weight    [outputs, r]

A module's output grows by `scale * (x A^T) B^T`. What is no plain LoRA of linear layers is refused
by its name, since an adapter without a part is not the adapter that was trained.
Nothing of the model's own is needed here: `engine.models.adapters.lora_weights` knows its layers.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.models.config.json_file import parse_json
from engine.models.config.wrappers import text_name
from engine.models.errors import CheckpointError
from engine.models.files.stored_tensors import StoredTensor, parse_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_WEIGHT_BYTES = 8 << 30
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number."""
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OTHER_TENSORS = {
    "lora_magnitude_vector": "has magnitude vectors, as DoRA has",
    "lora_embedding_": "adapts an embedding",
    ".base_layer.": "adapts an embedding or the head, and has a copy of it",
    ".bias": "has biases",
}
"""Says what tensors of other kinds of adapters are, by a part of their names."""
_OTHER_BASES = ("corda", "lora_ga", "loftq", "olora", "pissa")
"""Ways to begin a training that change the model's own weights."""
_REFUSED_FIELDS = {
    "use_dora": "is a DoRA adapter",
    "use_qalora": "is a QALoRA adapter",
    "modules_to_save": "replaces whole modules (modules_to_save)",
    "lora_bias": "has biases (lora_bias)",
    "layer_replication": "repeats layers of the model (layer_replication)",
    "trainable_token_indices": "has embeddings of its own (trainable_token_indices)",
    "target_parameters": "adapts parameters outside of linear layers (target_parameters)",
    "arrow_config": "mixes adapters by a router (arrow_config)",
    "alora_invocation_tokens": "is an activated LoRA (alora_invocation_tokens)",
    "use_bdlora": "has matrices of diagonal blocks (use_bdlora)",
    "kasa_config": "is a KaSA adapter (kasa_config)",
    "monteclora_config": "draws its weights at random (monteclora_config)",
    "velora_config": "is a VeLoRA adapter (velora_config)",
}
"""Fields that must be unset, with what an adapter is that has them."""
_MERGE = "merge it into the model, and serve that"
_CURES = {
    "alora_invocation_tokens": "train it as a plain LoRA: it holds behind its invocation tokens "
    "alone, so it cannot be merged either",
    "arrow_config": "serve the adapters that it mixes one by one",
}
"""These help where merging does not."""


class AdapterError(CheckpointError):
    """An adapter cannot be served. The message names its folder, the fault and the cure."""


class _Config(msgspec.Struct):
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    peft_type: str = "LORA"
    bias: str = "none"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class ModuleMatrices:
    """The matrices of one module, and by what their product is multiplied."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as it was read.

    Attributes:
        digest: SHA-256 of configuration and weights, in hexadecimal: what the adapter is.
        modules: By the name that the model's checkpoint has for the module, like
            "model.layers.0.mlp.up_proj".
        weights: The whole file of weights, into which the tensors of `modules` point.
    """

    folder: Path
    digest: str
    modules: dict[str, ModuleMatrices]
    weights: bytes

    @property
    def rank(self) -> int:
        """Returns the largest rank of any module."""
        return max(module.rank for module in self.modules.values())


def read_adapter(folder: str | Path, max_rank: int) -> AdapterFiles:
    """Reads an adapter of rank `max_rank` at most.

    Raises:
        AdapterError: It cannot be read, or is not what we can serve.
    """
    folder = Path(folder)
    config_bytes = _read(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    config, fields = _parse_config(folder, config_bytes)
    _check_kind(folder, config, fields)
    path = folder / WEIGHTS_FILE
    weights = _read(path, _MAX_WEIGHT_BYTES)
    length = int.from_bytes(weights[:8], "little")
    try:
        tensors = parse_header(path, weights[8 : 8 + length], len(weights))
    except CheckpointError as error:
        raise AdapterError(error.path, error.fault, error.cure) from error
    modules = {
        name: _module(folder, name, pair, config) for name, pair in _pairs(folder, tensors).items()
    }
    found = AdapterFiles(folder, _digest(config_bytes, weights), modules, weights)
    if found.rank > max_rank:
        raise AdapterError(
            folder,
            f"has rank {found.rank}, and slots are of rank {max_rank}",
            "raise --max-lora-rank, on prefill and decode nodes alike",
        )
    return found


def _read(path: Path, most: int) -> bytes:
    """Reads a whole file of `most` bytes at most."""
    try:
        with path.open("rb") as file:
            # What is asked for is taken as memory before anything is read.
            data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    except OSError as error:
        cure = "give the folder that PEFT's save_pretrained has written, with safetensors"
        raise AdapterError(path, f"cannot be read ({error.strerror or error})", cure) from error
    if len(data) > most:
        raise AdapterError(path, f"has more than {most} bytes", "check that this is an adapter")
    return data


def _parse_config(folder: Path, data: bytes) -> tuple[_Config, Mapping[str, Any]]:
    path = folder / CONFIG_FILE
    try:
        return parse_json(path, data, _Config), parse_json(path, data, dict[str, Any])
    except CheckpointError as error:
        raise AdapterError(
            path, f"is no adapter's configuration ({error.fault})", "save the adapter anew"
        ) from error


def _check_kind(folder: Path, config: _Config, fields: Mapping[str, Any]) -> None:
    """Raises `AdapterError` for everything that is no plain LoRA of linear layers."""
    if config.peft_type.upper() != "LORA":
        raise AdapterError(folder, f"is of PEFT type {config.peft_type}, not LORA", _MERGE)
    for name, what in _REFUSED_FIELDS.items():
        if fields.get(name):
            cure = _CURES.get(name, _MERGE)
            raise AdapterError(folder, f"{what}, which is not supported", cure)
    if config.bias != "none":
        raise AdapterError(folder, f"has biases (bias: {config.bias})", _MERGE)
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASES):
        raise AdapterError(
            folder,
            f"was trained beside changed weights of the model (init_lora_weights: {start})",
            "save it with path_initial_model_for_weight_conversion, or merge it into the model",
        )


def _pairs(
    folder: Path, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Returns A and B of each module."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name)
        if match is None:
            kinds = (what for part, what in _OTHER_TENSORS.items() if part in name)
            raise AdapterError(
                folder,
                f"{next(kinds, 'has a tensor that is no matrix of LoRA')} ({name})",
                _MERGE,
            )
        module = (text_name(match[1] + ".") or match[1]).removesuffix(".")
        found.setdefault(module, {})[match[2]] = tensor
    pairs: dict[str, tuple[StoredTensor, StoredTensor]] = {}
    for module, matrices in found.items():
        if len(matrices) < 2:
            has, lacks = ("A", "B") if "A" in matrices else ("B", "A")
            fault = f"has lora_{has} of {module} and no lora_{lacks}"
            raise AdapterError(folder, fault, "save the adapter anew")
        pairs[module] = matrices["A"], matrices["B"]
    if not pairs:
        raise AdapterError(folder, f"has no matrices in {WEIGHTS_FILE}", "save the adapter anew")
    return pairs


def _module(
    folder: Path, name: str, pair: tuple[StoredTensor, StoredTensor], config: _Config
) -> ModuleMatrices:
    a, b = pair
    for tensor in pair:
        size = math.prod(tensor.shape) * _FLOATS.get(tensor.dtype, 0)
        if not size or len(tensor.shape) != 2 or size != tensor.num_bytes:
            raise AdapterError(
                folder,
                f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, not a matrix of floats",
                "save the adapter anew",
            )
    own_name = _module_of(a)
    rank = _of_module(folder, own_name, config.rank_pattern, config.r)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(
            folder,
            f"{name} has matrices {list(a.shape)} and {list(b.shape)}, and rank {rank} in "
            f"{CONFIG_FILE}",
            "save the adapter anew",
        )
    alpha = _of_module(folder, own_name, config.alpha_pattern, config.lora_alpha)
    return ModuleMatrices(a, b, alpha / (rank**0.5 if config.use_rslora else rank))


def _module_of(matrix: StoredTensor) -> str:
    """Returns what the adapter itself calls the module of a matrix, as its patterns do."""
    match = _MATRIX.fullmatch(matrix.name)
    assert match is not None
    return match[1]


def _of_module(folder: Path, name: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """Returns the value of the pattern that names the module by its end, or the default."""
    for pattern, value in (patterns or {}).items():
        ending = pattern.removeprefix("^").replace(r"\.", ".")
        if re.search(r"[^\w.\-]", ending):
            raise AdapterError(
                folder,
                f"has the pattern {pattern!r}, and only names are understood",
                "name the modules one by one in rank_pattern and alpha_pattern",
            )
        if f".{name}".endswith(f".{ending}"):
            return value
    return default


def _digest(config: bytes, weights: bytes) -> str:
    digest = hashlib.sha256(b"tandem/lora/1\0" + len(config).to_bytes(8, "little") + config)
    digest.update(weights)
    return digest.hexdigest()
