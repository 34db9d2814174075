"""Makes one content of several: of turns that become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Part = TypeVar("Part")

GAP = "\n\n"
"""Stands between what two turns said."""


def joined_contents(
    contents: Sequence[str | list[Part]], part_of: Callable[[str], Part]
) -> str | list[Part]:
    """Returns texts as one text, or parts where any content has parts, of which texts become some
    by `part_of`. Each is copied once, however many there are."""
    texts: list[str] = []
    for one in contents:
        if not isinstance(one, str):
            break
        texts.append(one)
    else:
        return GAP.join(texts)
    rest = contents[len(texts) :]
    found: list[Part] = []
    for index, one in enumerate([GAP.join(texts), *rest] if texts else rest):
        if index:
            found.append(part_of(GAP))
        found += [part_of(one)] if isinstance(one, str) else one
    return found
