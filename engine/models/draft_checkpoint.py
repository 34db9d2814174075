"""Reads the checkpoint of a drafter, and says where it does not fit the model it drafts for.

Torch-free: a head that does not fit is named before any worker starts. Formats:

    eagle3       SafeAILab and SpecForge (`midlayer.`), or speculators (`layers.0.`, with the layer
                 in `transformer_layer_config`)
    eagle        SafeAILab's first form: one layer behind `fc`, without a norm in front of it
    medusa       vLLM's form: `blocks.N.layers.M`, `lm_heads.N`
    mtp          layers behind the last of the model's own checkpoint (DeepSeek V3 and V4, GLM 4.5,
                 Qwen3.5): as many as it has, and no more than there are drafts
    draft_model  any model that is served, with the same vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import msgspec
import xxhash

from engine.config import DrafterName, DraftModel, ModelConfig
from engine.models.checkpoint import load_model_config
from engine.models.config.config_file import ConfigFile, ConfigHead
from engine.models.config.json_file import read_json
from engine.models.errors import CheckpointError
from engine.models.files.weight_files import WeightFiles
from engine.models.registry import spec_of
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec, HeadNorm, NormNames
from engine.models.specs.llama import LlamaSpec

_FITTING = "choose a drafter that was made for this model"
_NUM_TAPS = 3
_HEAD_NORMS: dict[str | None, HeadNorm] = {None: "none", "llama": "none", "qwen3": "each"}
"""How an EAGLE-3 layer of a `model_type` normalises heads. speculators 0.9 writes Qwen3's where it
gives no other; SafeAILab and SpecForge have Llama's alone."""


class EagleSpec(LlamaSpec, frozen=True, kw_only=True):
    """The layer of a head of EAGLE's first form: nothing normalises what its attention reads."""

    norms: ClassVar[NormNames] = NormNames(before_attention=None)


class HeadFile(ConfigFile):
    """Holds what config.json says of an EAGLE head."""

    speculators_model_type: str | None = None
    dflash_config: dict[str, Any] | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_requires_grad: bool = False
    transformer_layer_config: ConfigHead | None = None
    eagle_config: dict[str, Any] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class MedusaFile(msgspec.Struct):
    """Holds what config.json says of Medusa heads, in vLLM's form."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_hidden_layers: int = 1
    truncated_vocab_size: int | None = None
    original_lm_head: bool = False


def read_draft(
    method: DrafterName, folder: str, target: ModelConfig, num_drafts: int = 1
) -> DraftModel:
    """Reads the drafter in `folder` for the model `target`; `mtp` has none of its own. Of layers
    that are there for one draft each, those of the first `num_drafts` are taken.

    Raises:
        CheckpointError: The folder is no such drafter, or it does not fit. Names the field.
    """
    spec = spec_of(target)
    assert isinstance(spec, DenseSpec)
    readers: dict[str, Callable[[Path, ModelConfig, DenseSpec], DraftModel]] = {
        "draft_model": _second_model,
        "eagle": _eagle,
        "eagle3": _eagle3,
        "medusa": _medusa,
        "mtp": partial(_mtp, num_drafts=num_drafts),
    }
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(folder, "is no folder", "name the folder of the drafter's checkpoint")
    has_several = spec.residual_streams is not None or spec.block_layers > 0
    if has_several and method == "eagle3":
        raise CheckpointError(
            target.path,
            f"has several residual streams, and drafters of the method {method} read one",
            "choose mtp, ngram or draft_model",
        )
    try:
        return readers[method](path, target, spec)
    except UnsupportedField as refusal:
        raise CheckpointError(
            path, f"asks for {refusal.what} ({refusal.field})", refusal.cure
        ) from refusal


def _second_model(folder: Path, target: ModelConfig, spec: DenseSpec) -> DraftModel:
    model = load_model_config(folder, dtype=target.dtype, load_format=target.load_format)
    _check(folder, "vocab_size", model.vocab_size, target.vocab_size)
    if any(kv.is_state or kv.window is not None for kv in model.kv_layers):
        raise CheckpointError(
            folder, "has layers with a window or a state", "choose a draft model without"
        )
    if model.max_model_len < target.max_model_len:
        raise CheckpointError(
            folder,
            f"max_position_embeddings is {model.max_model_len}, and sequences have up to "
            f"{target.max_model_len} tokens",
            "lower --max-model-len, or choose another draft model",
        )
    model = replace(model, max_model_len=target.max_model_len)
    return DraftModel(model=model, vocab_size=target.vocab_size)


def _head_file(method: DrafterName, folder: Path, target: ModelConfig, spec: DenseSpec) -> HeadFile:
    """Reads an EAGLE head's config.json and checks what all of them share."""
    path = folder / "config.json"
    whole = read_json(path, dict[str, Any])
    try:
        merged = {**whole, **(whole.get("transformer_layer_config") or {})}
        file = msgspec.convert(merged, HeadFile)
    except msgspec.ValidationError as error:
        raise CheckpointError(path, str(error), "correct the field") from error
    _check_kind(path, method, file)
    _check(path, "num_hidden_layers", file.num_hidden_layers, 1)
    _check(path, "vocab_size", file.vocab_size, target.vocab_size)
    _check(path, "hidden_size", file.hidden_size, spec.hidden_size)
    return file


def _check_kind(path: Path, method: DrafterName, file: HeadFile) -> None:
    """Refuses heads of other kinds, as speculators, ModelOpt and DFlash's authors write them."""
    kind = file.speculators_model_type or ("dflash" if file.dflash_config is not None else method)
    if kind != method:
        field = "speculators_model_type" if file.speculators_model_type else "dflash_config"
        is_here = kind in get_args(DrafterName)
        cure = f"choose the method {kind}" if is_here else "choose a drafter of another kind"
        raise CheckpointError(
            path, f"is a drafter of the kind {kind} ({field}), and the method is {method}", cure
        )


def _head_names(folder: Path, target: ModelConfig) -> frozenset[str]:
    """Returns the names of an EAGLE head's tensors. They tell what it is: fields of config.json
    may be of the model, from which some tools copy them."""
    names = _names(folder, target)
    for part, what, cure in (
        (".kv_a_proj_with_mqa.", "latent attention", "draft with the method ngram or mtp"),
        ("_scale", "quantised weights", "choose a drafter in bf16, fp16 or fp32"),
    ):
        if found := sorted(name for name in names if part in name):
            raise CheckpointError(folder, f"has {what} ({found[0]})", cure)
    return names


def _eagle(folder: Path, target: ModelConfig, spec: DenseSpec) -> DraftModel:
    file = _head_file("eagle", folder, target, spec)
    names = _head_names(folder, target)
    options = {"bias": "fc.bias" in names}
    layer = EagleSpec.from_config(file, target.max_model_len)
    model = _layers(folder, target, file, layer)
    return DraftModel(
        model=model, vocab_size=target.vocab_size, feature_size=spec.hidden_size, options=options
    )


def _eagle3(folder: Path, target: ModelConfig, spec: DenseSpec) -> DraftModel:
    file = _head_file("eagle3", folder, target, spec)
    path = folder / "config.json"
    if file.target_hidden_size is not None:
        _check(path, "target_hidden_size", file.target_hidden_size, spec.hidden_size)
    nested = file.eagle_config or {}
    for field, is_set in (
        ("eagle_config.use_aux_hidden_state", nested.get("use_aux_hidden_state") is False),
        ("embed_requires_grad, an embedding of its own,", file.embed_requires_grad),
    ):
        if is_set:
            raise CheckpointError(path, f"{field} is not supported", _FITTING)
    kind = file.transformer_layer_config and file.transformer_layer_config.model_type
    if kind not in _HEAD_NORMS:
        raise CheckpointError(
            path, f"transformer_layer_config.model_type {kind!r} is not supported", _FITTING
        )
    vocab_size = file.draft_vocab_size or file.vocab_size
    if vocab_size > target.vocab_size:
        raise CheckpointError(
            path, f"draft_vocab_size is {vocab_size}, of {target.vocab_size} tokens", _FITTING
        )
    layer = LlamaSpec.from_config(file, target.max_model_len)
    layer = msgspec.structs.replace(layer, head_norm=_HEAD_NORMS[kind])
    names = _head_names(folder, target)
    return DraftModel(
        model=_layers(folder, target, file, layer),
        vocab_size=vocab_size,
        feature_size=spec.hidden_size,
        taps=_taps(path, file, target.num_layers),
        options={
            "layer": "layers.0" if any(n.startswith("layers.0.") for n in names) else "midlayer",
            "norm_before_residual": file.norm_before_residual,
            "norm_before_fc": file.norm_before_fc,
            "fc_norm": file.fc_norm,
            "norm_output": file.norm_output,
            "has_map": "d2t" in names or vocab_size < target.vocab_size,
            "reads_map": bool(names),
        },
    )


def _taps(path: Path, file: HeadFile, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose input is tapped. SpecForge names the layers in front of them, in
    `eagle_config`; speculators the layers themselves."""
    field, ids = "eagle_aux_hidden_state_layer_ids", file.eagle_aux_hidden_state_layer_ids
    if nested := (file.eagle_config or {}).get(field):
        ids = [layer + 1 for layer in nested]
    ids = ids or [2, num_layers // 2, num_layers - 3]
    fits = len(ids) == _NUM_TAPS and list(ids) == sorted(set(ids))
    if not fits or not 0 <= ids[0] <= ids[-1] < num_layers:
        raise CheckpointError(
            path, f"{field} asks for layers {ids} of a model with {num_layers}", _FITTING
        )
    return tuple(ids)


def _medusa(folder: Path, target: ModelConfig, spec: DenseSpec) -> DraftModel:
    path = folder / "config.json"
    try:
        file = read_json(path, MedusaFile)
    except CheckpointError as error:
        cure = "Medusa heads are read in vLLM's form, with hidden_size, vocab_size and num_heads"
        raise CheckpointError(path, error.fault, cure) from error
    _check(path, "hidden_size", file.hidden_size, spec.hidden_size)
    _check(path, "vocab_size", file.vocab_size, target.vocab_size)
    if file.truncated_vocab_size not in (None, file.vocab_size) or file.original_lm_head:
        field = "original_lm_head" if file.original_lm_head else "truncated_vocab_size"
        raise CheckpointError(path, f"{field} is not supported", _FITTING)
    names = _names(folder, target)
    none = replace(target, path=str(folder), num_layers=0, quantization=None, wrapper="")
    return DraftModel(
        model=replace(none, model_hash=_digest("medusa", file, folder, target)),
        vocab_size=target.vocab_size,
        feature_size=spec.hidden_size,
        options={
            "num_heads": file.num_heads,
            "num_layers": file.num_hidden_layers,
            "bias": any(name.endswith(".layers.0.bias") for name in names),
            "prefix": "medusa_heads." if any(n.startswith("medusa_heads.") for n in names) else "",
        },
    )


def _mtp(folder: Path, target: ModelConfig, spec: DenseSpec, num_drafts: int) -> DraftModel:
    names, first = _names(folder, target), target.num_layers if spec.ahead.counts_on else 0
    if spec.ahead.dspark in names:
        raise CheckpointError(
            target.path,
            f"has DSpark's drafter ({spec.ahead.dspark}) in place of layers that predict ahead: "
            "layers that read three of the model's and draft a block of tokens in one pass, which "
            "a table of token pairs and confidences then choose among",
            "choose ngram or draft_model, or the release without it (DeepSeek-V4-Flash)",
        )
    layers = [spec.ahead.projection.format(first + i) for i in range(spec.num_extra_layers)]
    found = [target.load_format == "dummy" or f"{name}.weight" in names for name in layers]
    if not any(found[:1]):
        raise CheckpointError(
            target.path,
            f"has no layers that predict ahead ({spec.ahead.field} is {spec.num_extra_layers}, and "
            f"the weights are to begin with {spec.ahead.projection.format(first)})",
            "choose another method than mtp",
        )
    # Those that a checkpoint has: it may name more of them.
    count = min([*found, False].index(False), num_drafts)
    name = "mtp" if count == 1 else f"mtp-{count}"
    model = replace(target, num_layers=count, model_hash=f"{name}-{target.model_hash}")
    model = replace(model, kv_layers=spec.kv_layers_ahead(model))
    streams = spec.residual_streams
    return DraftModel(
        model=model,
        vocab_size=target.vocab_size,
        feature_size=count * spec.hidden_size * (1 if streams is None else streams.count),
        taps=() if streams is None else (target.num_layers,),
        options={"index": target.num_layers},
    )


def _layers(folder: Path, target: ModelConfig, file: ConfigFile, layer: DenseSpec) -> ModelConfig:
    return replace(
        target,
        path=str(folder),
        architecture="LlamaForCausalLM",
        wrapper="",
        num_layers=1,
        num_heads=file.num_attention_heads,
        num_kv_heads=file.num_kv_heads,
        head_dim=type(layer).head_dim_of(file),
        layer_heads=(),
        model_hash=_digest(type(layer).__name__, file, folder, target),
        spec=msgspec.to_builtins(layer),
        kv_layers=(),
        quantization=None,
    )


def _names(folder: Path, target: ModelConfig) -> frozenset[str]:
    """Returns the names of a checkpoint's tensors; none of a model with dummy weights."""
    if target.load_format == "dummy":
        return frozenset()
    if str(folder) != target.path:
        return frozenset(WeightFiles(folder).tensors)
    renamed = type(spec_of(target)).renamed_tensors
    return frozenset(WeightFiles(folder, target.wrapper, renamed).tensors)


def _digest(kind: str, file: object, folder: Path, target: ModelConfig) -> str:
    digest = xxhash.xxh3_128(repr((kind, file)).encode())
    if target.load_format != "dummy":
        digest.update(WeightFiles(folder).fingerprint())
    return digest.hexdigest()


def _check(path: Path, field: str, value: int, wanted: int) -> None:
    if value != wanted:
        raise CheckpointError(path, f"{field} is {value}, and must be {wanted}", _FITTING)
