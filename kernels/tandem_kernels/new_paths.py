"""Ways to compute that are taken when asked for alone, until a GPU has timed them in whole steps.

A worker turns on what its settings name, before it captures graphs. Those that a kernel's launcher
decides about are asked for here; a `GemmPolicy` knows the others.
"""

from __future__ import annotations

from collections.abc import Collection

_taken: frozenset[str] = frozenset()


def take_new_paths(names: Collection[str]) -> None:
    """Takes these paths in this process, and no others."""
    global _taken
    _taken = frozenset(names)


def takes_new_path(name: str) -> bool:
    """Returns whether a path was asked for."""
    return name in _taken
