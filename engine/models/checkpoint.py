"""From a name to a `ModelConfig`: find the checkpoint, read it, refuse what cannot be served.

Torch-free: node servers and the command line call this before any worker starts, so a wrong
folder is named in the first second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from engine.config import Dtype, LoadFormat, ModelConfig
from engine.models.config_file import ConfigFile, GenerationConfigFile, read_json
from engine.models.errors import CheckpointError
from engine.models.weight_files import WeightFiles

__all__ = ["CheckpointError", "check_tensor_parallel", "load_model_config", "resolve_model"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}
_STORED_DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes that its config.json does not say."""

    attention_bias: bool
    qk_norm: bool
    head_dim: int | None
    """Where config.json has none; None: hidden_size / heads."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(attention_bias=False, qk_norm=False, head_dim=None),
    "Qwen2ForCausalLM": _Family(attention_bias=True, qk_norm=False, head_dim=None),
    "Qwen3ForCausalLM": _Family(attention_bias=False, qk_norm=True, head_dim=128),
}


def resolve_model(
    name_or_path: str,
    report: Callable[[float], None] | None = None,
    *,
    load_format: LoadFormat = "safetensors",
) -> Path:
    """Folder of a complete checkpoint: the one named, or the hub's, downloaded if need be.

    Args:
        report: Told the finished fraction, 0..1.
        load_format: `dummy` asks for config.json alone.

    Raises:
        CheckpointError: No such folder or hub name, or a file is missing or cut off.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        folder = _download(name_or_path, folder, load_format)
    folder = folder.resolve()
    for name in ("config.json", "tokenizer.json") if load_format != "dummy" else ("config.json",):
        if not (folder / name).is_file():
            raise CheckpointError(
                folder / name, "is missing", "name a folder with a complete Hugging Face checkpoint"
            )
    if load_format == "safetensors":
        WeightFiles(folder)
    if report is not None:
        report(1.0)
    return folder


def _download(name: str, folder: Path, load_format: LoadFormat) -> Path:
    if folder.exists():
        raise CheckpointError(folder, "is a file", "name the folder that holds config.json")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            folder, "does not exist", "check the path, or give a Hugging Face name like org/model"
        )
    patterns = _HUB_FILES if load_format == "safetensors" else _HUB_FILES[:-1]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            name,
            "is neither a local folder nor a model on the hub",
            "check the spelling; a private or gated model needs HF_TOKEN",
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            name,
            f"is no local folder and cannot be downloaded ({type(error).__name__})",
            "check the network and HF_TOKEN, or copy the checkpoint here and name its folder",
        ) from error


def load_model_config(
    path: Path | str,
    *,
    dtype: Dtype | Literal["auto"] = "auto",
    served_model_name: str | None = None,
    max_model_len: int | None = None,
    load_format: LoadFormat = "safetensors",
) -> ModelConfig:
    """Reads a checkpoint folder.

    Args:
        dtype: `auto`: what config.json says, else what the weights are stored in.
        served_model_name: None: the hub's name of a downloaded checkpoint, else the folder's.
        max_model_len: None: all positions that the model was made for.

    Raises:
        CheckpointError: The folder is incomplete, or asks for something tandem does not have.
    """
    folder = Path(path)
    file = read_json(folder / "config.json", ConfigFile)
    architecture = _architecture(folder, file)
    family = _FAMILIES[architecture]
    _check_supported(folder, file)
    weights = WeightFiles(folder) if load_format == "safetensors" else None
    head_dim = file.head_dim or family.head_dim or file.hidden_size // file.num_attention_heads
    config = ModelConfig(
        path=str(folder),
        served_model_name=served_model_name or _name_of(folder.resolve()),
        architecture=architecture,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=file.num_key_value_heads or file.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=file.rms_norm_eps,
        rope_theta=file.base_frequency(),
        rope_scaling=file.scaling(),
        tie_word_embeddings=file.tie_word_embeddings,
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        max_model_len=_max_model_len(folder, file, max_model_len),
        eos_token_ids=_eos_token_ids(folder, file),
        dtype=_stored_dtype(folder, file, weights) if dtype == "auto" else dtype,
        load_format=load_format,
        model_hash="",
    )
    return replace(config, model_hash=_model_hash(config, weights))


def _name_of(folder: Path) -> str:
    """The hub's cache keeps org/name in `models--org--name/snapshots/REVISION`."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def check_tensor_parallel(model: ModelConfig, size: int) -> None:
    """Raises `CheckpointError` when `size` ranks cannot share the model evenly."""
    for count, name in (
        (model.num_heads, "attention heads"),
        (model.intermediate_size, "feed-forward units"),
    ):
        if count % size:
            raise CheckpointError(
                model.path,
                f"has {count} {name}, which {size} tensor-parallel ranks cannot share evenly",
                "choose a tensor_parallel_size that divides them",
            )
    if model.num_kv_heads % size and size % model.num_kv_heads:
        raise CheckpointError(
            model.path,
            f"has {model.num_kv_heads} key/value heads, which {size} tensor-parallel ranks can "
            "neither share nor repeat evenly",
            "choose a tensor_parallel_size that divides them or is a multiple of them",
        )


def _architecture(folder: Path, file: ConfigFile) -> str:
    known = ", ".join(_FAMILIES)
    for name in file.architectures or []:
        if name in _FAMILIES:
            return name
    named = ", ".join(file.architectures or []) or "none"
    raise CheckpointError(
        folder / "config.json",
        f"names architecture {named}, which tandem does not have",
        f"use a checkpoint of {known}",
    )


def _check_supported(folder: Path, file: ConfigFile) -> None:
    """Refuses what would otherwise be computed wrongly in silence."""
    for fault in _faults(file):
        raise CheckpointError(
            folder / "config.json",
            f"asks for {fault}, which tandem does not have",
            "use a plain checkpoint of this family, in fp32, fp16 or bf16",
        )


def _faults(file: ConfigFile) -> Iterator[str]:
    kv_heads = file.num_key_value_heads or file.num_attention_heads
    sizes = (
        file.vocab_size,
        file.hidden_size,
        file.intermediate_size,
        file.num_hidden_layers,
        file.num_attention_heads,
        file.max_position_embeddings,
        kv_heads,
    )
    if min(sizes) < 1:
        yield "a size below 1"
    if file.num_attention_heads % kv_heads:
        yield f"{file.num_attention_heads} heads over {kv_heads} key/value heads"
    if file.quantization_config is not None:
        yield "quantised weights"
    if file.hidden_act != "silu":
        yield f"hidden_act {file.hidden_act!r}"
    if file.attention_bias or file.mlp_bias:
        yield "biases beyond those of its family (attention_bias or mlp_bias)"
    if file.use_sliding_window or set(file.layer_types or ()) - {"full_attention"}:
        yield "attention over a sliding window"
    if (file.partial_rotary_factor or file.rope.partial_rotary_factor) != 1.0:
        yield "rotary embedding of a part of each head"
    try:
        file.scaling()
    except ValueError as error:
        yield str(error)


def _max_model_len(folder: Path, file: ConfigFile, wanted: int | None) -> int:
    if wanted is None:
        return file.max_position_embeddings
    if not 1 <= wanted <= file.max_position_embeddings:
        raise CheckpointError(
            folder / "config.json",
            f"says {file.max_position_embeddings} positions, but max_model_len is {wanted}",
            f"choose max_model_len from 1 to {file.max_position_embeddings}",
        )
    return wanted


def _eos_token_ids(folder: Path, file: ConfigFile) -> tuple[int, ...]:
    ids = file.eos_token_id
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_json(path, GenerationConfigFile)
        ids = ids if generation.eos_token_id is None else generation.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _stored_dtype(folder: Path, file: ConfigFile, weights: WeightFiles | None) -> Dtype:
    named = file.dtype or file.torch_dtype
    if named is None and weights is not None:
        stored = {_STORED_DTYPES.get(tensor.dtype) for tensor in weights.tensors.values()}
        named = next((dtype for dtype in stored if dtype and len(stored) == 1), None)
    dtype = _DTYPES.get(named or "bfloat16")
    if dtype is not None:
        return dtype
    raise CheckpointError(
        folder / "config.json",
        f"has dtype {named!r}",
        "choose --dtype float32, float16 or bfloat16",
    )


def _model_hash(config: ModelConfig, weights: WeightFiles | None) -> str:
    """Of everything that the KV depends on, but the dtype, which peers compare by name."""
    facts = (
        config.architecture,
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.rms_norm_eps,
        config.rope_theta,
        config.rope_scaling,
    )
    digest = xxhash.xxh3_128(repr(facts).encode())
    digest.update(b"dummy" if weights is None else weights.fingerprint())
    return digest.hexdigest()
