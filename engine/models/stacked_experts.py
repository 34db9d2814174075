"""Experts that a checkpoint has in one tensor a layer, named as if each had its own.

experts.gate_up_proj  [E, 2 I, H]   experts.0.gate_proj.weight [I, H] ... experts.0.up_proj ...
experts.down_proj     [E, H, I]     experts.0.down_proj.weight [H, I] ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from engine.models.weight_files import StoredTensor

_PROJECTIONS = {
    ".experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".experts.down_proj": ("down_proj",),
}


def unstacked(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by name, stacked ones as their parts; only those of two dimensions can be
    what a reader wants, so any other is left as it is.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        for ending, projections in _PROJECTIONS.items():
            is_whole = len(tensor.shape) == 3 and tensor.shape[1] % len(projections) == 0
            if name.endswith(ending) and is_whole:
                found.update(_parts(name.removesuffix(ending) + ".experts", tensor, projections))
                break
        else:
            found[name] = tensor
    return found


def _parts(
    prefix: str, tensor: StoredTensor, projections: tuple[str, ...]
) -> Iterator[tuple[str, StoredTensor]]:
    count, rows, columns = tensor.shape
    rows //= len(projections)
    size = (tensor.stop - tensor.start) // (count * len(projections))
    names = [(i, name) for i in range(count) for name in projections]
    starts = accumulate([size] * len(names), initial=tensor.start)
    for (index, name), start in zip(names, starts, strict=False):
        part = replace(tensor, shape=(rows, columns), start=start, stop=start + size)
        yield f"{prefix}.{index}.{name}.weight", part
