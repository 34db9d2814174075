"""Tiles that may be fast, from `tilings.toml`, which says what a grid of them is."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

_FORMATS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
T = TypeVar("T")


def tilings(name: str, kind: Callable[..., T], rows: float, *, gated: bool = False) -> Iterator[T]:
    """Yields what the grids of a format have for this many rows, each made by `kind`."""
    names: list[str] = _FORMATS[name]["names"]
    for grid in _FORMATS[name]["grids"]:
        if grid.get("above", 0) < rows <= grid.get("up_to", math.inf):
            fields = {**grid, **(grid.get("gated", {}) if gated else {})}
            fields = {key: fields[key] for key in fields if isinstance(fields[key], list)}
            tiles = [zip(names, tile, strict=True) for tile in fields.pop("tiles", [])] or [()]
            for tile, *values in itertools.product(map(dict, tiles), *fields.values()):
                yield kind(**tile, **dict(zip(fields, values, strict=True)))
