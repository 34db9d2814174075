"""Reads parameters from safetensors.

The model says which checkpoint tensors fill which parameters (`checkpoint_weights`); this reads
just those slices, so a rank never holds more than its share plus one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import EngineConfig
from engine.layers.shard import CheckpointWeight
from engine.models.base import CausalLM
from engine.models.errors import CheckpointError
from engine.models.weight_files import StoredTensor, WeightFiles

_FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Older checkpoints store the rotary frequencies; they follow from config.json."""
_DUMMY_STD = 0.02
_WRONG_CONFIG = "config.json and the weights do not belong together: download the checkpoint again"


def load_weights(model: CausalLM, config: EngineConfig, report: Callable[[float], None]) -> None:
    """Fills every parameter of `model`, cast to its dtype.

    Args:
        report: Told the finished fraction of the bytes, 0..1.

    Raises:
        CheckpointError: A tensor is missing, superfluous, of another shape, or unreadable.
    """
    wanted = list(model.checkpoint_weights())
    with torch.no_grad():
        if config.model.load_format == "dummy":
            _fill_dummy(wanted, report)
        else:
            files = WeightFiles(Path(config.model.path))
            _load(files, wanted, model.unused_weights, report)
    report(1.0)


def _load(
    files: WeightFiles,
    wanted: list[CheckpointWeight],
    unused: frozenset[str],
    report: Callable[[float], None],
) -> None:
    _check_names(files, {weight.name for weight in wanted}, unused)
    by_file: dict[Path, list[CheckpointWeight]] = {}
    for weight in wanted:
        stored = files.tensors[weight.name]
        _check_stored(weight, stored)
        by_file.setdefault(stored.file, []).append(weight)
    total = sum(weight.target.nbytes for weight in wanted)
    loaded = 0
    for path in sorted(by_file):
        for weight in _fill_from(path, by_file[path]):
            loaded += weight.target.nbytes
            report(loaded / total)


def _check_names(files: WeightFiles, wanted: set[str], unused: frozenset[str]) -> None:
    missing = sorted(wanted - files.tensors.keys())
    if missing:
        raise CheckpointError(files.folder, f"lacks {_some(missing)}", _WRONG_CONFIG)
    prefixes = tuple(name for name in unused if name.endswith("."))
    extra = sorted(
        name
        for name in files.tensors.keys() - wanted - unused
        if not name.endswith(_COMPUTED_SUFFIX) and not name.startswith(prefixes)
    )
    if extra:
        raise CheckpointError(
            files.folder, f"has tensors that the model does not use: {_some(extra)}", _WRONG_CONFIG
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _check_stored(weight: CheckpointWeight, stored: StoredTensor) -> None:
    if stored.shape != weight.shape:
        raise CheckpointError(
            stored.file,
            f"has {weight.name} of shape {list(stored.shape)}, but config.json makes it "
            f"{list(weight.shape)}",
            _WRONG_CONFIG,
        )
    if stored.dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            stored.file,
            f"has {weight.name} in {stored.dtype}",
            "use a checkpoint in fp32, fp16 or bf16",
        )


def _fill_from(path: Path, weights: list[CheckpointWeight]) -> Iterable[CheckpointWeight]:
    try:
        with safe_open(path, framework="pt") as file:
            for weight in weights:
                _fill(weight, _read(file, weight))
                yield weight
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            path, f"cannot be read ({error})", "copy or download the checkpoint again"
        ) from error


def _fill(weight: CheckpointWeight, stored: Tensor) -> None:
    """Fills the target; `stored` is its slice."""
    if weight.order is not None:
        stored = stored.index_select(0, weight.order.to(stored.device))
    weight.target.copy_(stored)
    if weight.offset:
        weight.target.add_(weight.offset)


def _read(file: Any, weight: CheckpointWeight) -> Tensor:
    """Reads one slice; `file` is safetensors' open file, which has no types."""
    stored = file.get_slice(weight.name)
    if weight.dim is None:
        whole: Tensor = stored[:]
        return whole
    stop = weight.start + weight.target.shape[weight.dim]
    part: Tensor = (
        stored[weight.start : stop] if weight.dim == 0 else stored[:, weight.start : stop]
    )
    return part


def _fill_dummy(wanted: list[CheckpointWeight], report: Callable[[float], None]) -> None:
    """Fills in random weights that depend on names only: every rank cuts from the same tensors."""
    for index, weight in enumerate(wanted):
        target = weight.target
        generator = torch.Generator(target.device)
        generator.manual_seed(xxhash.xxh3_64_intdigest(weight.name.encode()) >> 1)
        whole = torch.empty(weight.shape, dtype=torch.float32, device=target.device)
        whole.normal_(0.0, _DUMMY_STD, generator=generator)
        if weight.name.endswith("norm.weight"):
            whole += 1.0 - weight.offset
        if weight.dim is not None:
            whole = whole.narrow(weight.dim, weight.start, target.shape[weight.dim])
        _fill(weight, whole)
        report((index + 1) / len(wanted))
