"""Names a node that may hold a prompt's prefix, `prefill/host:port` or `decode/host:port`, and the
prefix."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

_HOLDER = re.compile(r"(prefill|decode)/((?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5})")


HashChains: TypeAlias = dict[int, list[bytes]]
"""Hashes of a prompt's full blocks from the first on (`engine.kv_cache.block_hash`), by the tokens
of such a block. Every group of layers makes its names of one of them."""


class PrefixHolder(NamedTuple):
    """Is a node's place: `address` is where its gRPC services are, as host:port."""

    is_decode: bool
    address: str

    @classmethod
    def parse(cls, text: str) -> PrefixHolder | None:
        """Returns None for what names nothing."""
        found = _HOLDER.fullmatch(text)
        return cls(found[1] == "decode", found[2]) if found else None


def checked_holder(text: str) -> str:
    """Returns `text`, or nothing if it names nothing: a prompt can be computed without."""
    return text if PrefixHolder.parse(text) is not None else ""
