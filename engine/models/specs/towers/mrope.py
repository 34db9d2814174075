"""Positions with three axes in the text part ("mrope"): which pair of a head turns by which."""

from __future__ import annotations

from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import TowerFile


def rope_axes(
    file: TowerFile, default: tuple[int, int, int], *, is_interleaved: bool
) -> tuple[int, ...]:
    """Returns the axis of each pair of a head, [head_dim / 2]: in three blocks, or taken in turn as
    long as rows and columns last. Pairs that stay have any. Raises `UnsupportedField`."""
    part = file.whole.get("text_config") or file.whole
    rope = part.get("rope_parameters") or part.get("rope_scaling") or {}
    section = tuple(rope.get("mrope_section") or default)
    turning = file.text.rotary_dim // 2
    if len(section) != 3 or sum(section) != turning:
        raise UnsupportedField(
            "mrope_section",
            f"rotary positions {section} of heads of which {2 * turning} elements turn",
        )
    axes = [axis for axis, count in enumerate(section) for _ in range(count)]
    if is_interleaved:
        axes = [0] * turning
        for axis in (1, 2):
            for pair in range(axis, min(3 * section[axis], turning), 3):
                axes[pair] = axis
    return (*axes, *[0] * (file.text.head_dim // 2 - turning))
