"""Reads the first items of a list. Those behind them are skipped, and nothing is made of them: a
body may hold 32,768 objects or a million numbers (`edge.http.bodies.json_counter`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TypeVar

import msgspec

_Item = TypeVar("_Item")


def reader_of_first(most: int, kind: type[_Item]) -> Callable[[msgspec.Raw | bytes], list[_Item]]:
    """Returns what gives the first `most` items of a JSON list, each decoded as `kind`. It raises
    what `msgspec` raises."""
    names = [f"item_{number}" for number in range(most)]
    fields = [(name, kind | msgspec.UnsetType, msgspec.UNSET) for name in names]
    decode = msgspec.json.Decoder(msgspec.defstruct("_FirstItems", fields, array_like=True)).decode

    def read(raw: msgspec.Raw | bytes) -> list[_Item]:
        return list(takewhile(_is_set, msgspec.structs.astuple(decode(raw))))

    return read


def _is_set(item: object) -> bool:
    return item is not msgspec.UNSET
