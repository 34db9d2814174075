"""Reads parameters from safetensors.

The model says which checkpoint tensors fill which parameters (`checkpoint_weights`); this checks
that these are all, and reads just their slices, so a rank never holds more than its share and what
is read ahead.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from engine.config import EngineConfig, ModelConfig
from engine.layers.shard import FLOATS, CheckpointWeight, TensorSlice
from engine.models.errors import CheckpointError
from engine.models.files.foreign_weights import packed_by
from engine.models.files.passing_digests import PassingDigests
from engine.models.files.stored_tensors import PIECE_BYTES, StoredTensor
from engine.models.files.weight_files import EMBEDDING, HEAD, WeightFiles
from engine.models.files.weight_reader import WeightReader
from engine.models.kv_scale_files import is_kv_scale
from engine.models.registry import MODELS
from engine.models.weights.cut_projections import cut_projections
from engine.models.weights.dummy_weights import fill_dummy
from engine.models.weights.fill_jobs import fill_jobs
from engine.models.weights.joined_layers import joined
from engine.models.weights.stacked_experts import StackableExperts, unstacked

_COMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Older checkpoints store the rotary frequencies; they follow from config.json."""
_QUANTISATION_SUFFIXES = (
    "_scale", "_scale_inv", "_scale_2", "_global_scale", "_zero_point", "_scales", "_blocks",
    "_packed", "_shape", ".scales", ".qweight", ".qzeros", ".g_idx", ".absmax", ".quant_map",
    "k_proj.k_bias", "v_proj.v_bias", "_bias_k", "_bias_v",
)  # fmt: skip
"""How names end of what quantisers store beside, or in place of, weights."""
_MIB = 1 << 20
_REPORTS = 400
"""The finished fraction is reported about this many times."""
_MAX_THREADS = 8
"""More readers than this find no more in a page cache or on a disk."""
_WRONG_CONFIG = "config.json and the weights do not belong together: download the checkpoint again"


@dataclass(frozen=True, slots=True)
class SkippedTensors:
    """Lists what a checkpoint has and a model does not read: a tower for images, layers that
    predict ahead, a second copy of a tied head."""

    names: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        heads = Counter(_head_of(name) for name in self.names)
        what = ", ".join(f"{head} ({count})" for head, count in sorted(heads.items()))
        return f"{len(self.names)} tensors, {self.num_bytes / _MIB:.1f} MiB: {what}"


class Loadable(Protocol):
    """A model, or a drafter for one, as it describes its checkpoint."""

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        """Yields every tensor that the checkpoint must have, and where it goes."""

    @property
    def stackable_experts(self) -> StackableExperts | None: ...
    @property
    def elsewhere(self) -> frozenset[str]: ...
    @property
    def unused_weights(self) -> frozenset[str]: ...


def load_weights(
    model: Loadable,
    config: EngineConfig,
    report: Callable[[float], None],
    on_total: Callable[[int], None] = lambda total: None,
    *,
    is_tower: bool = False,
    digests: PassingDigests | None = None,
) -> SkippedTensors:
    """Fills every parameter of `model`, cast to its dtype, and returns what it has left aside.

    Args:
        report: Called with the finished fraction of the bytes, 0..1.
        on_total: Called with the bytes that this rank reads, before the first.
        digests: Is given all that is read of the files.
        is_tower: `model` is the vision tower, whose tensors are beside those of the text part.

    Raises:
        CheckpointError: A tensor is missing, superfluous, of another shape, or unreadable.
    """
    wanted = list(model.checkpoint_weights())
    with torch.no_grad():
        if config.model.load_format == "dummy":
            fill_dummy(wanted, report)
            skipped = SkippedTensors((), 0)
        else:
            files = files_of(config.model)
            if digests is not None:
                digests.expect([*files.tensors.values(), *files.others])
            if is_tower and config.model.vision is not None:
                files.take_tower(config.model.vision)
            if num_ranks := config.model.spec.get("projection_ranks", 0):
                files.tensors = cut_projections(files.tensors, num_ranks)
            if numbers := config.model.spec.get("stored_layers", ()):
                files.tensors = joined(files.tensors, tuple(numbers))
            if (experts := model.stackable_experts) is not None:
                files.tensors = unstacked(files.tensors, experts)
            _take_tied_head(files, wanted)
            wanted = [_without_absent(weight, files) for weight in wanted]
            _leave_to_others(files, wanted, tuple(model.elsewhere))
            skipped = _check(files, wanted, model.unused_weights)
            _load(files, wanted, report, on_total, digests)
    report(1.0)
    return skipped


def files_of(model: ModelConfig) -> WeightFiles:
    """Returns the files of a model, or of a drafter. Raises `CheckpointError`."""
    renamed = MODELS[model.architecture].renamed_tensors
    return WeightFiles(Path(model.path), model.wrapper, renamed)


def _without_absent(weight: CheckpointWeight, files: WeightFiles) -> CheckpointWeight:
    """Returns a source without those tensors that a checkpoint may lack and this one lacks."""
    there = tuple(
        part for part in weight.companions if not part.is_optional or part.name in files.tensors
    )
    return weight if len(there) == len(weight.companions) else replace(weight, companions=there)


def _take_tied_head(files: WeightFiles, wanted: list[CheckpointWeight]) -> None:
    """Takes the head as the embedding where that is not stored and both are one: safetensors'
    `save_model` stores what is shared under one of its names."""
    names = {part.name for weight in wanted for part in weight.slices}
    if EMBEDDING in names - files.tensors.keys() and HEAD not in names and HEAD in files.tensors:
        files.tensors[EMBEDDING] = files.tensors.pop(HEAD)


def _leave_to_others(
    files: WeightFiles, wanted: list[CheckpointWeight], elsewhere: tuple[str, ...]
) -> None:
    """Drops what other stages of a pipeline read and this one does not."""
    ours = {part.name for weight in wanted for part in weight.slices}
    for name in [name for name in files.tensors if name.startswith(elsewhere)]:
        if name not in ours:
            del files.tensors[name]


def _check(
    files: WeightFiles, wanted: list[CheckpointWeight], unused: frozenset[str]
) -> SkippedTensors:
    needless = unused | {name for weight in wanted for name in weight.beside}
    names = {part.name for weight in wanted for part in weight.slices}
    _check_names(files, names, needless)
    for weight in wanted:
        for index, part in enumerate(weight.slices):
            _check_stored(part, files.tensors[part.name], is_companion=index > 0)
    left = {name for name in files.tensors.keys() - names if not is_kv_scale(name)}
    skipped = [*files.others, *(files.tensors[name] for name in left)]
    return SkippedTensors(
        tuple(sorted(tensor.name for tensor in skipped)),
        sum(tensor.num_bytes for tensor in skipped),
    )


def _load(
    files: WeightFiles,
    wanted: list[CheckpointWeight],
    report: Callable[[float], None],
    on_total: Callable[[int], None],
    digests: PassingDigests | None,
) -> None:
    by_file = sorted(wanted, key=lambda weight: files.tensors[weight.name].file)
    jobs = [job for weight in by_file for job in fill_jobs(weight, files)]
    total = max(1, sum(piece.num_bytes for job in jobs for piece in job.pieces))
    on_total(total)
    gpu = next((one.target.device for one in wanted if one.target.device.type == "cuda"), None)
    # Fewer bytes take less time than threads take to start.
    num_threads = num_reading_threads() if total > PIECE_BYTES else 0
    reader = WeightReader(num_threads, gpu=gpu, digests=digests)
    told = 0
    for job, memory in reader.read(jobs):
        job.fill(memory)
        if digests is not None and job.is_hashed_on_gpu:
            digests.lies_in(job.stored[0].block, job.target)
        if reader.num_bytes - told >= total / _REPORTS:
            told = reader.num_bytes
            report(told / total)


def num_reading_threads() -> int:
    """Returns how many threads read the files of a rank."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _head_of(name: str) -> str:
    """Returns what a tensor is counted under: two parts of its name, or three of a layer's."""
    parts = name.split(".")
    return ".".join(parts[: 3 if "layers" in parts[:2] else 2][: len(parts) - 1])


def _check_names(files: WeightFiles, wanted: set[str], unused: frozenset[str]) -> None:
    missing = sorted(wanted - files.tensors.keys())
    if missing and all(name.endswith(_QUANTISATION_SUFFIXES) for name in missing):
        raise CheckpointError(
            files.folder,
            f"lacks {_some(missing)}, of layers that are quantised by config.json",
            "list layers that stay plain in its quantization_config; the experts of a layer must "
            "all be quantised, or none",
        )
    prefixes = tuple(name for name in unused if name.endswith("."))
    extra = sorted(
        name
        for name in files.tensors.keys() - wanted - unused
        if not name.endswith(_COMPUTED_SUFFIX)
        and not name.startswith(prefixes)
        and not is_kv_scale(name)
    )
    packer = packed_by(extra)
    scales = [name for name in extra if packed_by([name]) or name.endswith(_QUANTISATION_SUFFIXES)]
    if scales and (packer or not missing):
        what = f"weights as {packer}" if packer else "numbers of a quantisation"
        raise CheckpointError(
            files.folder,
            f"has {what} of which config.json says nothing that tandem computes by: "
            f"{_some(scales)}",
            "use a checkpoint that is quantised otherwise, or plain; docs/models.md lists the "
            "formats",
        )
    if missing:
        raise CheckpointError(files.folder, f"lacks {_some(missing)}", _WRONG_CONFIG)
    if extra:
        raise CheckpointError(
            files.folder,
            f"has tensors that the model does not use: {_some(extra)}",
            "the weights are of another model than config.json describes, or it has a feature that "
            "tandem lacks: use a checkpoint of an architecture in docs/models.md",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _check_stored(part: TensorSlice, stored: StoredTensor, *, is_companion: bool) -> None:
    """Scales of a row or of a tensor may have another dimension of one, or lack it."""
    same = stored.shape == part.shape
    if is_companion and not same:
        same = _without_ones(stored.shape) == _without_ones(part.shape)
    if not same:
        raise CheckpointError(
            stored.file,
            f"has {part.name} of shape {list(stored.shape)}, but config.json makes it "
            f"{list(part.shape)}",
            _WRONG_CONFIG,
        )
    if stored.dtype not in part.stored:
        cure = f"its type must be {' or '.join(sorted(part.stored))}: {_WRONG_CONFIG}"
        if part.stored == FLOATS and not stored.dtype.startswith("F8"):
            cure = "use a checkpoint in fp32, fp16 or bf16"
        raise CheckpointError(stored.file, f"has {part.name} in {stored.dtype}", cure)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without trailing ones."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
