"""Fits groups of KV to each other: a drafter's beside its model's, quantised numbers, and blocks
that share pages well."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kv_transfer.layout import FP8, KVGroup

INDEX_PLANE, INDEX_SCALE_PLANE = "index", "index_scale"
"""Planes of index keys and of their scales, whose numbers have a type of their own, whatever the
`dtype` of their group."""


def in_fp8(group: KVGroup, scales: str) -> KVGroup:
    """Returns the group with numbers of one byte, where it keeps rows of tokens; states stay, and
    so do index keys."""
    if group.is_state:
        return group
    size = group.number_bytes
    planes = tuple(
        plane
        if plane.name in (INDEX_PLANE, INDEX_SCALE_PLANE)
        else msgspec.structs.replace(plane, row_bytes=plane.row_bytes // size)
        for plane in group.planes
    )
    return msgspec.structs.replace(group, planes=planes, dtype=FP8, scales=scales)


def share_page_size(groups: Sequence[KVGroup], tp_size: int) -> tuple[KVGroup, ...]:
    """Returns the groups with block sizes at which they share pages best: a group that needs less
    than the largest gets 2, 4, ... times its block size, as long as that fits. What is left of its
    pages is unused. A state is of one size, often larger than others are to begin with."""
    page_bytes = max(group.bytes_needed(tp_size) for group in groups)
    grown = []
    for group in groups:
        factor = 1 if group.is_state else page_bytes // group.bytes_needed(tp_size)
        block_size = group.block_size << (factor.bit_length() - 1)
        grown.append(msgspec.structs.replace(group, block_size=block_size))
    return tuple(grown)


def with_draft_layers(groups: Sequence[KVGroup], of_draft: Sequence[KVGroup]) -> list[KVGroup]:
    """Returns the groups of a model and of its drafter, whose layers are numbered on. Layers that
    are cached like others of the model join them: they share blocks."""
    first = 1 + max(group.layers[-1] for group in groups)
    found = list(groups)
    for group in of_draft:
        layers = tuple(first + layer for layer in group.layers)
        alike = (
            index
            for index, one in enumerate(found)
            if msgspec.structs.replace(one, layers=()) == msgspec.structs.replace(group, layers=())
        )
        if (index := next(alike, None)) is None:
            found.append(msgspec.structs.replace(group, layers=layers))
        else:
            joined = found[index].layers + layers
            found[index] = msgspec.structs.replace(found[index], layers=joined)
    return found
