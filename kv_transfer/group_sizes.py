"""Fits groups of KV to each other: a drafter's beside its model's, quantised numbers, and blocks
that share pages well."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import msgspec

from kv_transfer.layout import FP8, STATE_SPAN, KVGroup
from kv_transfer.planes import Plane

INDEX_PLANE, INDEX_SCALE_PLANE = "index", "index_scale"
"""Planes of index keys and of their scales, whose numbers have a type of their own, whatever the
`dtype` of their group."""

NARROW_PLANE, EXPONENT_PLANE = "narrow", "exponent"
"""Planes of vectors whose numbers are partly in e4m3, beside exponents of their own. What is left
of a vector lies in the plane between them."""

LONGEST = 8
"""Blocks of rows that stand for many tokens have at most this many times the tokens of others, if
they are not in the blocks of those. A prefix is found where every group has a whole block, which
would be rare if a page were filled with rows of 128 tokens."""


def in_fp8(group: KVGroup, scales: str, narrow: tuple[Plane, ...] = ()) -> KVGroup:
    """Returns the group with numbers of one byte, where it keeps what is attended; states stay, and
    so do rows that are still open, and index keys. `narrow`: planes that it has instead, where not
    every number takes a byte."""
    if group.is_state or group.is_open:
        return group
    if narrow:
        return msgspec.structs.replace(group, planes=narrow, scales=scales)
    size = group.number_bytes
    planes = tuple(
        plane
        if plane.name in (INDEX_PLANE, INDEX_SCALE_PLANE)
        else msgspec.structs.replace(plane, row_bytes=plane.row_bytes // size)
        for plane in group.planes
    )
    return msgspec.structs.replace(group, planes=planes, dtype=FP8, scales=scales)


def share_page_size(
    groups: Sequence[KVGroup], tp_size: int, *, shares_blocks: bool = True
) -> tuple[KVGroup, ...]:
    """Returns the groups with block sizes at which they share pages best: a group that needs less
    than the largest gets 2, 4, ... times its block size, as long as that fits. What is left of its
    pages is unused. A state is of one size, often larger than others are to begin with; of rows
    that are still open a token takes as much as many that are closed, so their blocks may be
    halved, too. Rows that stand for most tokens lie in the blocks of those that stand for fewest,
    if these have slots for them and `shares_blocks`."""
    host, last = _host_of(groups) if shares_blocks else None, len(groups) - 1
    if host is not None:
        longer = list(groups)
        size = lcm(groups[host].block_size, groups[last].compress_ratio)
        longer[host] = _resized(groups[host], size)
        fitted = _all_fitted(longer, tp_size)
        guest = _resized(fitted[last], fitted[host].block_size)
        if _has_slots_for(guest, fitted, host, tp_size):
            return (*fitted[:last], msgspec.structs.replace(guest, blocks_of=host))
    return tuple(_all_fitted(groups, tp_size))


def _host_of(groups: Sequence[KVGroup]) -> int | None:
    """Returns the group in whose blocks the last one may lie."""
    *others, last = groups
    ratios = {i: group.compress_ratio for i, group in enumerate(others) if group.compress_ratio > 1}
    host = min(ratios, key=ratios.__getitem__, default=None)
    return None if host is None or ratios[host] >= last.compress_ratio else host


def _has_slots_for(guest: KVGroup, groups: list[KVGroup], host: int, tp_size: int) -> bool:
    """Returns whether blocks of `host` have unused slots for all layers of the last group."""
    own = groups[:-1]
    num_free = max(len(group.layers) for group in own) - len(groups[host].layers)
    page_bytes = max(group.bytes_needed(tp_size) for group in own)
    return num_free * (page_bytes // guest.bytes_needed(tp_size)) >= len(guest.layers)


def _all_fitted(groups: Sequence[KVGroup], tp_size: int) -> list[KVGroup]:
    page_bytes = max(
        (_resized(group, 1) if group.is_open else group).bytes_needed(tp_size) for group in groups
    )
    least = min((group.block_size for group in groups if group.compress_ratio > 1), default=0)
    return [_fitted(group, page_bytes, tp_size, LONGEST * least) for group in groups]


def _fitted(group: KVGroup, page_bytes: int, tp_size: int, longest: int) -> KVGroup:
    """Returns the group with blocks that fill a page, those of rows of several tokens with at most
    `longest`, and open ones with no more than are needed at a time."""
    if group.is_state:
        return group
    if group.is_open:
        longest = (group.window or 1) - 1 + group.window_align
    elif group.compress_ratio == 1:
        longest = STATE_SPAN

    def fits(size: int) -> bool:
        return size <= longest and _resized(group, size).bytes_needed(tp_size) <= page_bytes

    size = group.block_size
    while size % (2 * group.compress_ratio) == 0 and not fits(size):
        size //= 2
    while fits(2 * size):
        size *= 2
    return _resized(group, size)


def _resized(group: KVGroup, block_size: int) -> KVGroup:
    return msgspec.structs.replace(group, block_size=block_size)


def with_draft_layers(groups: Sequence[KVGroup], of_draft: Sequence[KVGroup]) -> list[KVGroup]:
    """Returns the groups of a model and of its drafter, whose layers are numbered on. Layers that
    are cached like others of the model join the fewest of these: they share blocks."""
    first = 1 + max(group.layers[-1] for group in groups)
    found = list(groups)
    for group in of_draft:
        layers = tuple(first + layer for layer in group.layers)
        alike = [
            index
            for index, one in enumerate(found)
            if msgspec.structs.replace(one, layers=()) == msgspec.structs.replace(group, layers=())
        ]
        if alike:
            index = min(alike, key=lambda index: len(found[index].layers))
            joined = found[index].layers + layers
            found[index] = msgspec.structs.replace(found[index], layers=joined)
        else:
            found.append(msgspec.structs.replace(group, layers=layers))
    return found
