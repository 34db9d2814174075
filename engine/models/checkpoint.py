"""Turns a name into a `ModelConfig`: finds the checkpoint, reads it, and refuses what cannot be
served.

Torch-free: node servers and the command line call this before any worker starts, so a wrong
folder is named in the first second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from engine.config import Dtype, LoadFormat, ModelConfig, ParallelConfig, QuantizationName
from engine.contracts.model_identity import PENDING
from engine.expert_placement import initial_placement
from engine.models.config.config_file import ConfigFile
from engine.models.config.mistral_params import config_path, read_config
from engine.models.config.number_names import number_name
from engine.models.config.wrappers import text_config
from engine.models.errors import CheckpointError
from engine.models.files.weight_files import EMBEDDING, HEAD, WeightFiles
from engine.models.identity import model_hash_of
from engine.models.quantization.fused_layers import check_fused_layers
from engine.models.quantization.reader import read_quantization
from engine.models.registry import MODELS, find_architecture, spec_of
from engine.models.slow_reads import telling_slow_reads
from engine.models.specs.base import ModelSpec, UnsupportedField
from engine.models.specs.dense import DenseSpec
from engine.models.specs.towers.fields import TextSizes
from engine.models.specs.vision import read_vision
from engine.models.vocabularies.end_tokens import find_end_tokens
from engine.models.vocabularies.files import TOKENIZER_FILE, has_tokenizer
from engine.quantization import Quantization

__all__ = [
    "CheckpointError",
    "check_architecture",
    "check_name",
    "check_parallel",
    "is_here",
    "load_model_config",
    "resolve_draft",
    "resolve_model",
]

_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}
_STORED_DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def resolve_model(
    name_or_path: str,
    report: Callable[[float], None] | None = None,
    *,
    load_format: LoadFormat = "safetensors",
    revision: str | None = None,
) -> Path:
    """Returns the folder of a complete checkpoint: the one named, or the hub's, downloaded if need
    be.

    Args:
        report: Called with the finished fraction, 0..1.
        load_format: `dummy` asks for config.json alone.
        revision: Branch, tag or commit of a model on the hub; None: its main branch.

    Raises:
        CheckpointError: No such folder or hub name, or a file is missing or cut off.
    """
    folder = Path(name_or_path).expanduser()
    with telling_slow_reads(folder):
        gguf_file, is_folder = _gguf_file(name_or_path, folder), folder.is_dir()
    if gguf_file is not None:
        from engine.models.gguf.convert import converted

        folder, is_folder = converted(gguf_file), True
    if not is_folder:
        from engine.models.files.hub import download

        folder = download(name_or_path, folder, load_format, revision, check=check_architecture)
    elif revision is not None:
        raise CheckpointError(
            folder,
            f"is a folder, which has no revision {revision}",
            "leave --revision, or name a model on the hub",
        )
    folder = folder.resolve()
    check_architecture(folder)
    asked = [(config_path(folder), config_path(folder).is_file())]
    if load_format != "dummy":
        asked.append((folder / TOKENIZER_FILE, has_tokenizer(folder)))
    for path, is_there in asked:
        if not is_there:
            raise CheckpointError(
                path,
                "is missing",
                "this is an adapter: name its base model, and the adapter in --lora-modules"
                if path == asked[0][0] and (folder / "adapter_config.json").is_file()
                else "name a folder with a complete Hugging Face checkpoint",
            )
    if load_format == "safetensors":
        WeightFiles(folder)
    if report is not None:
        report(1.0)
    return folder


def resolve_draft(name_or_path: str) -> Path:
    """Returns the folder of a drafter's checkpoint: the one named, or the hub's, downloaded if need
    be. Raises `CheckpointError`."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        from engine.models.files.hub import download

        folder = download(name_or_path, folder, "safetensors")
    return folder.resolve()


def is_here(name: str) -> bool:
    """Returns whether a model can be read without a download or a conversion. Raises
    `CheckpointError` for a folder with several files in the GGUF format."""
    folder = Path(name).expanduser()
    return folder.is_dir() and _gguf_file(name, folder) is None


def check_name(name: str) -> None:
    """Raises `CheckpointError` for what is no checkpoint of this machine and cannot be a name on
    the hub. Asks no hub."""
    if not is_here(name):
        folder = Path(name).expanduser()
        if _gguf_file(name, folder) is None:
            from engine.models.files.hub import check_hub_name

            check_hub_name(name, folder)


def check_architecture(folder: Path | str) -> None:
    """Raises `CheckpointError` when a checkpoint's config.json names no architecture that is here.
    Without a config.json nothing is said."""
    path = config_path(Path(folder).expanduser())
    if path.is_file():
        find_architecture(path)


def _gguf_file(name: str, folder: Path) -> Path | None:
    """Returns the GGUF file that a name stands for, itself or alone in a folder; None: it is none.
    Raises `CheckpointError` for a folder with several, and for a name on the hub that can only be
    GGUF, before anything is downloaded."""
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        return folder
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if not files and (folder.exists() or not re.search(r"(?i)[-_.]gguf(:|$)", name)):
        return None
    if any(folder.glob("*.safetensors")):
        return None
    if len(files) == 1:
        return files[0]
    raise CheckpointError(
        name,
        "holds several files in the GGUF format"
        if files
        else "is in the GGUF format, of which no file is here",
        "name one file, downloaded before, or the original checkpoint",
    )


def load_model_config(
    folder: Path | str,
    *,
    dtype: Dtype | Literal["auto"] = "auto",
    served_model_name: str | None = None,
    max_model_len: int | None = None,
    load_format: LoadFormat = "safetensors",
    quantization: QuantizationName | None = None,
    hashes_later: bool = False,
) -> ModelConfig:
    """Reads a checkpoint folder.

    Args:
        dtype: `auto`: what config.json says, else what the weights are stored in.
        served_model_name: None: the hub's name of a downloaded checkpoint, else the folder's.
            Several names are separated by commas.
        max_model_len: None: all positions that the model was made for.
        quantization: None: as config.json says; `fp8` quantises plain weights as they are loaded.
        hashes_later: The identity stays pending, so that nothing waits for all weights here.

    Raises:
        CheckpointError: The folder is incomplete, or asks for something tandem does not have.
    """
    folder = Path(folder)
    path = config_path(folder)
    architecture, wrapper = find_architecture(path)
    kind = MODELS[architecture]
    weights = None
    if load_format == "safetensors":
        weights = WeightFiles(folder, wrapper, kind.renamed_tensors)
    file, whole = _read_config(path, wrapper, weights)
    with _named(path):
        file = kind.renamed(file)
        length = _max_model_len(folder, file, max_model_len)
        spec = kind.from_config(file, length)
        place, values = file.quantization
        schemes = _own_schemes(read_quantization(folder, values, quantization, place), spec)
        layer_heads = kind.read_heads(file)
        text = _text_sizes(file, cast(DenseSpec, spec))
        vision, vision_fault = read_vision(folder, wrapper, whole, text)
    if weights is not None:
        check_fused_layers(folder, schemes, weights.tensors)
    names = _names(served_model_name or "") or [_name_of(folder.resolve())]
    config = ModelConfig(
        path=str(folder),
        served_model_name=names[0],
        served_aliases=tuple(names[1:]),
        architecture=architecture,
        wrapper=wrapper,
        vocab_size=file.vocab_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=file.num_kv_heads,
        head_dim=kind.head_dim_of(file),
        layer_heads=layer_heads,
        max_model_len=length,
        eos_token_ids=find_end_tokens(folder, file),
        dtype=_stored_dtype(folder, file, weights) if dtype == "auto" else dtype,
        load_format=load_format,
        model_hash=PENDING,
        spec=msgspec.to_builtins(spec),
        quantization=schemes,
        vision=vision,
        vision_fault=vision_fault,
    )
    found = PENDING if hashes_later else model_hash_of(config)
    return replace(config, model_hash=found, kv_layers=spec.kv_layers(config))


def _own_schemes(schemes: Quantization | None, spec: ModelSpec) -> Quantization | None:
    """Returns how layers are quantised, by the names that an architecture's checkpoints have."""
    if schemes is None:
        return None
    schemes = msgspec.structs.replace(schemes, ignored=(*schemes.ignored, *spec.plain_layers))
    if not spec.written_names:
        return schemes
    numbers = cast(DenseSpec, spec).stored_layers
    return msgspec.structs.replace(schemes, written_names=spec.written_names, stored_layers=numbers)


def _read_config(
    path: Path, wrapper: str, weights: WeightFiles | None
) -> tuple[ConfigFile, dict[str, Any]]:
    """Reads what a decoder is, out of the whole model that it is the text part of, if it is one.
    Returns that and what is said of the whole model."""
    if not wrapper:
        whole, file = {}, read_config(path, ConfigFile)
    else:
        whole = read_config(path, dict[str, Any])
        try:
            file = msgspec.convert(text_config(wrapper, whole), ConfigFile)
        except msgspec.ValidationError as error:
            raise CheckpointError(path, f"{error} in text_config", "correct the field") from error
    if fault := file.size_fault():
        raise CheckpointError(path, fault, "correct the field")
    if weights is not None:
        file.tie_word_embeddings = _is_tied(
            file.tie_word_embeddings, weights, is_part=bool(wrapper)
        )
    return file, whole


def _text_sizes(file: ConfigFile, spec: DenseSpec) -> TextSizes:
    """Returns what a tower knows of the decoder behind it."""
    head_dim = spec.head_dim_of(file)
    return TextSizes(file.hidden_size, head_dim, spec.rotary.dim, spec.rms_norm_eps)


def _is_tied(said: bool | None, weights: WeightFiles, *, is_part: bool) -> bool | None:
    """Returns whether the head is the embedding, where config.json has `said` so; None: as the
    family has it."""
    if said is None and is_part:
        # Releases leave it to the class of the whole model, and these differ from their text part.
        return not {HEAD, EMBEDDING} <= weights.tensors.keys()
    # A head that was trained apart is often stored beside a config.json that still ties it. As in
    # transformers the head counts.
    return False if said is not False and weights.differ(HEAD, EMBEDDING) else said


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def _name_of(folder: Path) -> str:
    """Returns the model's name; the hub's cache keeps org/name in
    `models--org--name/snapshots/REVISION`.
    """
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def check_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `CheckpointError` when this many ranks cannot share the model."""
    spec = spec_of(model)
    if parallel.enable_expert_parallel and not spec.num_experts:
        raise CheckpointError(
            model.path,
            "has no experts that ranks could share",
            "start without --enable-expert-parallel",
        )
    spec.check_parallel(model, parallel)
    if parallel.eplb is not None:
        num_redundant = parallel.eplb.num_redundant_experts
        try:
            initial_placement(spec.num_experts, num_redundant, parallel.num_ranks)
        except ValueError as error:
            raise CheckpointError(
                model.path,
                f"has experts that cannot be balanced: {error}",
                "choose another num_redundant_experts in --eplb-config",
            ) from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Refuses the checkpoint of this config.json where a field asks for what is not here."""
    try:
        yield
    except UnsupportedField as refusal:
        raise CheckpointError(
            path,
            f"asks for {refusal.what} ({refusal.field}), which tandem does not have",
            refusal.cure,
        ) from refusal


def _max_model_len(folder: Path, file: ConfigFile, wanted: int | None) -> int:
    if wanted is None:
        return file.max_position_embeddings
    if not 1 <= wanted <= file.max_position_embeddings:
        raise CheckpointError(
            config_path(folder),
            f"says {file.max_position_embeddings} positions, but max_model_len is {wanted}",
            f"choose max_model_len from 1 to {file.max_position_embeddings}",
        )
    return wanted


def _stored_dtype(folder: Path, file: ConfigFile, weights: WeightFiles | None) -> Dtype:
    named = file.dtype or file.torch_dtype
    if named is None and weights is not None:
        plain = {tensor.dtype for tensor in weights.tensors.values()} & _STORED_DTYPES.keys()
        named = _STORED_DTYPES[next(iter(plain))] if len(plain) == 1 else None
    dtype = _DTYPES.get(number_name(named or "bfloat16"))
    if dtype is not None:
        return dtype
    raise CheckpointError(
        config_path(folder),
        f"has dtype {named!r}",
        "choose --dtype float32, float16 or bfloat16",
    )
