"""Reads parameters from safetensors.

The model says which checkpoint tensors fill which parameters (`checkpoint_weights`); this reads
just those slices, so a rank never holds more than its share plus one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import EngineConfig
from engine.layers.shard import FLOATS, CheckpointWeight, TensorSlice
from engine.models.base import CausalLM
from engine.models.errors import CheckpointError
from engine.models.kv_scale_files import is_kv_scale
from engine.models.stacked_experts import unstacked
from engine.models.weight_files import StoredTensor, WeightFiles

_COMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Older checkpoints store the rotary frequencies; they follow from config.json."""
_DUMMY_STD = 0.02
_TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""Types of quantised weights and their scales."""
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
            files = WeightFiles(Path(config.model.path), config.model.wrapper)
            if model.may_have_stacked_experts:
                files.tensors = unstacked(files.tensors)
            _load(files, wanted, model.unused_weights, report)
    report(1.0)


def _load(
    files: WeightFiles,
    wanted: list[CheckpointWeight],
    unused: frozenset[str],
    report: Callable[[float], None],
) -> None:
    needless = unused | {name for weight in wanted for name in weight.beside}
    _check_names(files, {part.name for weight in wanted for part in weight.slices}, needless)
    by_file: dict[Path, list[CheckpointWeight]] = {}
    for weight in wanted:
        for index, part in enumerate(weight.slices):
            _check_stored(part, files.tensors[part.name], is_companion=index > 0)
        by_file.setdefault(files.tensors[weight.name].file, []).append(weight)
    total = sum(weight.target.nbytes for weight in wanted)
    loaded = 0
    for path in sorted(by_file):
        for weight in _fill_from(path, by_file[path], files):
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
        if not name.endswith(_COMPUTED_SUFFIX)
        and not name.startswith(prefixes)
        and not is_kv_scale(name)
    )
    if extra:
        raise CheckpointError(
            files.folder, f"has tensors that the model does not use: {_some(extra)}", _WRONG_CONFIG
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
        if part.stored == FLOATS and stored.dtype not in _TYPES:
            cure = "use a checkpoint in fp32, fp16 or bf16"
        raise CheckpointError(stored.file, f"has {part.name} in {stored.dtype}", cure)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without trailing ones."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _fill_from(
    path: Path, weights: list[CheckpointWeight], files: WeightFiles
) -> Iterable[CheckpointWeight]:
    """Fills weights whose first tensor is in one file. Companions are seldom in another."""
    try:
        with ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, framework="pt"))}
            for weight in weights:
                slices = []
                for part in weight.slices:
                    stored = files.tensors[part.name]
                    if stored.file not in opened:
                        file = stack.enter_context(safe_open(stored.file, framework="pt"))
                        opened[stored.file] = file
                    slices.append(_read(opened[stored.file], part, stored))
                _fill(weight, *slices)
                yield weight
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            path, f"cannot be read ({error})", "copy or download the checkpoint again"
        ) from error


def _fill(weight: CheckpointWeight, stored: Tensor, *companions: Tensor) -> None:
    """Fills the target from what is stored."""
    if weight.fill is not None:
        device = weight.target.device
        weight.fill(stored.to(device), *(tensor.to(device) for tensor in companions))
        return
    if weight.order is not None:
        stored = stored.index_select(0, weight.order.to(stored.device))
    weight.target.copy_(stored)
    if weight.offset:
        weight.target.add_(weight.offset)


def _read(file: Any, part: TensorSlice, stored: StoredTensor) -> Tensor:
    """Reads one slice of a tensor; `file` is safetensors' open file, which has no types."""
    tensor = file.get_slice(stored.name)
    place: list[int | slice] = [slice(None)] * (part.dim or 0)
    if part.dim is not None:
        place.append(slice(part.start, part.start + part.count))
    if stored.inside is not None:
        index, first = stored.inside
        rows = place[0] if part.dim == 0 else slice(0, stored.shape[0])
        assert isinstance(rows, slice)
        place = [index, slice(first + rows.start, first + rows.stop), *place[1:]]
    if not place:
        whole: Tensor = tensor[:] if part.shape else file.get_tensor(stored.name)
        return whole
    sliced: Tensor = tensor[tuple(place)]
    return sliced


def _fill_dummy(wanted: list[CheckpointWeight], report: Callable[[float], None]) -> None:
    """Fills in random weights that depend on names only: every rank cuts from the same tensors."""
    for index, weight in enumerate(wanted):
        _fill(weight, *(_dummy(part, weight) for part in weight.slices))
        report((index + 1) / len(wanted))


def _dummy(part: TensorSlice, weight: CheckpointWeight) -> Tensor:
    device = weight.target.device
    generator = torch.Generator(device)
    generator.manual_seed(xxhash.xxh3_64_intdigest(part.name.encode()) >> 1)
    kind = None if part.stored & FLOATS else _TYPES[min(part.stored)]
    if part.dummy is not None:
        whole = torch.full(part.shape, part.dummy, dtype=kind or torch.float32, device=device)
    elif kind is not None and not kind.is_floating_point:
        limits = torch.iinfo(kind)
        whole = torch.randint(
            limits.min, limits.max, part.shape, generator=generator, device=device, dtype=kind
        )
    else:
        whole = torch.empty(part.shape, dtype=torch.float32, device=device)
        whole.normal_(0.0, _DUMMY_STD if kind is None else 1.0, generator=generator)
        if part.name.endswith("norm.weight"):
            whole += 1.0 - weight.offset
        whole = whole.to(kind or torch.float32)
    return whole if part.dim is None else whole.narrow(part.dim, part.start, part.count)
