"""Fills models with random weights, for measurements."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash
from torch import Tensor

from engine.layers.shard import FLOATS, CheckpointWeight, TensorSlice
from engine.models.weights.fill_jobs import STORED_TYPES, fill_weight

_STD = 0.02


def fill_dummy(wanted: list[CheckpointWeight], report: Callable[[float], None]) -> None:
    """Fills in random weights that depend on names only: every rank cuts from the same tensors."""
    for index, weight in enumerate(wanted):
        if weight.target.numel() > 0:
            fill_weight(weight, weight.target, *(_dummy(part, weight) for part in weight.slices))
        report((index + 1) / len(wanted))


def _dummy(part: TensorSlice, weight: CheckpointWeight) -> Tensor:
    device = weight.target.device
    generator = torch.Generator(device)
    name, shape = part.name, part.shape
    if part.index is not None:
        name, shape = f"{name}[{part.index}]", shape[1:]
    generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    kind = None if part.stored & FLOATS else STORED_TYPES[min(part.stored)]
    if part.dummy is not None:
        whole = torch.full(shape, part.dummy, device=device).to(kind or torch.float32)
    elif kind is not None and not kind.is_floating_point:
        limits = torch.iinfo(kind)
        low, high = (limits.min, limits.max) if part.below is None else (0, part.below)
        whole = torch.randint(low, high, shape, generator=generator, device=device, dtype=kind)
    else:
        whole = torch.empty(shape, dtype=torch.float32, device=device)
        whole.normal_(0.0, _STD if kind is None else 1.0, generator=generator)
        if part.name.endswith("norm.weight"):
            whole += 1.0 - weight.offset
        whole = whole.to(kind or torch.float32)
    return whole if part.dim is None else whole.narrow(part.dim, part.start, part.count)
