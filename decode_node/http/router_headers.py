"""Reads the headers that only a router sends to a decode node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from decode_node.serving.request_context import PromptPlace
from edge.http import headers as names
from edge.http.errors import BadRequest
from engine.contracts.prefix_holder import checked_holder

_PREFIX_HASH = re.compile("[0-9a-f]{16}")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")
_MAX_PREFILL_NODES = 16
_MAX_PLACES = 64
_MAX_DIGITS = 12


def prefix_hash(text: str) -> int:
    """Returns the number that 16 hex digits stand for; 0 for anything else."""
    return int(text, 16) if _PREFIX_HASH.fullmatch(text) else 0


def prompt_places(headers: Mapping[str, str]) -> list[PromptPlace]:
    """Returns where a router wants prompts computed; nothing if it does not say. Raises
    `BadRequest`."""
    named = headers.get(names.PREFILL_NODES)
    first = PromptPlace(
        None if named is None else prefill_nodes(named),
        prefix_hash(headers.get(names.PREFIX, "")),
        checked_holder(headers.get(names.PREFIX_HOLDER, "")),
    )
    given = headers.get(names.PROMPT_PLACES, "")
    parts = [part.partition("/") for part in given.split(";")[:_MAX_PLACES]] if given else []
    return [first, *(PromptPlace(prefill_nodes(at), prefix_hash(name)) for name, _, at in parts)]


def prefill_nodes(text: str) -> list[str]:
    """Returns the `host:port` of each, best first. Raises `BadRequest`."""
    nodes = [part.strip() for part in text.split(",") if part.strip()]
    for node in nodes:
        if not _HOST_PORT.fullmatch(node):
            raise BadRequest(
                f"{names.PREFILL_NODES} must be host:port, comma separated",
                param=names.PREFILL_NODES,
            )
    return nodes[:_MAX_PREFILL_NODES]


def resume_offset(headers: Mapping[str, str]) -> int | None:
    """Returns the length of the client's own body where an answer is resumed: what exists of the
    answer already follows it. None where it is not. Raises `BadRequest`."""
    text = headers.get(names.RESUME)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS):
        raise BadRequest(f"{names.RESUME} must be a number of bytes", param=names.RESUME)
    return int(text)
