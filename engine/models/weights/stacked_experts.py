"""Experts that a checkpoint has in one tensor a layer, named as if each had its own.

    experts.gate_up_proj  [E, 2 I, H]   experts.0.gate_proj.weight [I, H] ... experts.0.up_proj ...
    experts.down_proj     [E, H, I]     experts.0.down_proj.weight [H, I] ...

transformers 5 has every family so in memory, and writes it so if it is asked to; Qwen3.5 is
published like this. Others are published turned, [E, H, 2 I] and [E, I, H] (Qwen3-VL with experts).
In FP8 it writes scales beside them, for blocks or one or two for each expert:

    experts.gate_up_proj_scale_inv         [E, rows, columns]
    experts.gate_up_proj_activation_scale  [E]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.models.files.stored_tensors import StoredTensor
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertNames

_IN_MEMORY = "mlp"
"""transformers 5 calls the block of every family so, whatever is published."""


_SCALES = re.compile(r"(gate_up_proj|down_proj)_(scale_inv|activation_scale)")
_PROJECTION = re.compile(r"(.*\.experts)\.((?:gate|up|down)_proj\..*)")
"""Step has a tensor of all experts for each projection, and scales alike."""
_ONE = re.compile(r"(.*\.experts\.\d+)\.(gate|up|down)_proj\.(.*)")
"""Tools that take transformers' experts apart call those of every family so."""
_OF_TENSORS = {"scale_inv": "weight_scale", "activation_scale": "input_scale"}
"""Most publishers call scales of whole tensors so."""


@dataclass(frozen=True, slots=True)
class StackableExperts:
    """Says how a family calls its experts, and how large they are.

    Attributes:
        units: Of one expert.
    """

    names: ExpertNames
    units: int
    hidden_size: int


def stackable_experts(spec: DenseSpec) -> StackableExperts | None:
    """Returns the experts of a model that may be stacked; None: it has none, or always so."""
    experts = spec.experts
    if experts is None or experts.stacked:
        return None
    return StackableExperts(experts.names, experts.intermediate_size, spec.hidden_size)


def unstacked(
    tensors: dict[str, StoredTensor], experts: StackableExperts
) -> dict[str, StoredTensor]:
    """Returns the tensors by name, stacked ones [E, ...] as their parts, under the names of the
    family. What is of another shape is left as it is."""
    names, units, hidden_size = experts.names, experts.units, experts.hidden_size
    projections = {"gate_up_proj": (names.gate, names.up), "down_proj": (names.down,)}
    shapes = {"gate_up_proj": (2 * units, hidden_size), "down_proj": (hidden_size, units)}
    is_turned = any(
        name.endswith(f".experts.{stack}")
        and tensor.shape[1:] == shape[::-1]
        and shape[0] != shape[1]
        for name, tensor in tensors.items()
        for stack, shape in shapes.items()
    )
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        wanted = shapes.get(last, ())[:: -1 if is_turned else 1]
        if parent.endswith(".experts") and last in shapes and tensor.shape[1:] == wanted:
            for part, at in _parts(parent, tensor, projections[last], is_turned=is_turned):
                found[_published(part, names)] = at
        elif (whole := _PROJECTION.fullmatch(name)) and len(tensor.shape) == 3:
            for part, at in _experts(whole[1], whole[2], tensor):
                found[_published(part, names)] = at
        elif parent.endswith(".experts") and (scaled := _SCALES.fullmatch(last)):
            for part, at in _scales(parent, tensor, projections[scaled[1]], scaled[2]):
                found[_published(part, names)] = at
        else:
            if one := _ONE.fullmatch(name):
                name = f"{one[1]}.{getattr(names, one[2])}.{one[3]}"
            found[_published(name, names)] = tensor
    return found


def _published(name: str, names: ExpertNames) -> str:
    """Returns a tensor's name with the block of experts called as the family calls it. Dense blocks
    are called `mlp` by all."""
    before, found, part = name.partition(f".{_IN_MEMORY}.")
    of_block = "experts", names.shared, names.router, names.choice_bias
    if not found or part.partition(".")[0] not in {one.partition(".")[0] for one in of_block}:
        return name
    return f"{before}.{names.block}.{part}"


def _parts(
    prefix: str, tensor: StoredTensor, projections: tuple[str, ...], *, is_turned: bool
) -> Iterator[tuple[str, StoredTensor]]:
    count, rows, columns = tensor.shape
    if is_turned:
        yield from _turned_parts(prefix, tensor, projections)
        return
    rows //= len(projections)
    size = tensor.num_bytes // (count * len(projections))
    names = [(i, name) for i in range(count) for name in projections]
    starts = accumulate([size] * len(names), initial=tensor.start)
    for (index, name), start in zip(names, starts, strict=False):
        part = replace(tensor, shape=(rows, columns), start=start, stop=start + size)
        yield f"{prefix}.{index}.{name}.weight", part


def _experts(prefix: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of single experts, which lie behind each other."""
    count, *shape = tensor.shape
    size = tensor.num_bytes // max(1, count)
    for index in range(count):
        start = tensor.start + index * size
        part = replace(tensor, shape=tuple(shape), start=start, stop=start + size)
        yield f"{prefix}.{index}.{name}", part


def _scales(
    prefix: str, tensor: StoredTensor, projections: tuple[str, ...], kind: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the scales of each expert's projections, which share one where there is no more."""
    count, rows, columns = (*tensor.shape, 1, 1)[:3]
    is_shared = rows < len(projections)
    rows = rows if is_shared else rows // len(projections)
    whole = tensor.num_bytes // count
    size = whole if is_shared else whole // len(projections)
    is_one = rows == columns == 1
    ending = _OF_TENSORS[kind] if is_one else f"weight_{kind}"
    for index in range(count):
        for place, name in enumerate(projections):
            start = tensor.start + index * whole + (0 if is_shared else place * size)
            shape = () if is_one else (rows, columns)
            part = replace(tensor, shape=shape, start=start, stop=start + size)
            yield f"{prefix}.{index}.{name}.{ending}", part


def _turned_parts(
    prefix: str, tensor: StoredTensor, projections: tuple[str, ...]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the projections as columns of their expert's matrix, where they lie in a row."""
    count, inputs, all_columns = tensor.shape
    size, columns = tensor.num_bytes // count, all_columns // len(projections)
    for index in range(count):
        start = tensor.start + index * size
        for place, name in enumerate(projections):
            yield (
                f"{prefix}.{index}.{name}.weight",
                replace(
                    tensor,
                    shape=(columns, inputs),
                    start=start,
                    stop=start + size,
                    column=place * columns,
                    num_columns=all_columns,
                ),
            )
