"""Says blocks of /v1/messages as text: those that hold some besides plain text.

    document              of plain text or of blocks, below its title and its context
    search_result         below its title and its source
    web_search_tool_result, web_fetch_tool_result
                          what another server found: titles and addresses
    code_execution_tool_result, mcp_tool_result, advisor_tool_result and kin
                          what tools of another server said, as far as it is text
    tool_reference, tool_addition, tool_removal
                          which tools there are from then on (`tool_changes.py`)

Whatever is encrypted for another server means nothing elsewhere, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from decode_node.protocol.messages.tool_changes import CHANGES, said
from edge.http.errors import BadRequest

Json = dict[str, Any]

_ENCRYPTED = (
    "redacted_thinking", "server_tool_use", "mcp_tool_use", "tool_search_tool_result", "fallback",
)  # fmt: skip
_RAN_THERE = (
    "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "mcp_tool_result", "advisor_tool_result",
)  # fmt: skip
"""Results of tools that ran on another server."""
_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
_KINDS = (
    "text, image, document, search_result, tool_use, tool_result, tool_reference, tool_addition, "
    "tool_removal and thinking, in turns that have them"
)


def without_billing(system: str) -> str:
    """Returns a system prompt without the line by which a client tells the API what it is. The line
    is another one in each conversation, so that none would share its prefix with the others."""
    return _BILLING.sub("", system, count=1) if _BILLING.match(system) else system


def is_unreadable(block: Json) -> bool:
    """Says whether a block is for the server that wrote it alone."""
    return block.get("type") in _ENCRYPTED


def text_of(block: Json, place: str, deferred: Mapping[str, Json]) -> str:
    """Returns what a block says. `deferred`: functions that were not shown yet, by name. Raises
    `BadRequest` for one that holds no text."""
    kind = block.get("type")
    match kind:
        case "text":
            return string(block, "text", place)
        case "document":
            return _document(block, place)
        case "search_result":
            body = _joined(block.get("content"), f"{place}.content")
            return _lines(block.get("title"), block.get("source"), body)
        case _ if kind in CHANGES:
            return said(block, place, deferred)[0]
        case "web_search_tool_result" | "web_fetch_tool_result":
            return _found(block.get("content"))
        case _ if kind in _RAN_THERE:
            return _printed(block.get("content"))
        case _:
            raise BadRequest(
                f"{place}.type: blocks can be {_KINDS}; nothing else is supported",
                param=f"{place}.type",
            )


def string(block: Json, name: str, place: str) -> str:
    """Returns a field of a block. Raises `BadRequest` if it is no text."""
    value = block.get(name)
    if not isinstance(value, str):
        place = f"{place}.{name}"
        raise BadRequest(f"{place} must be a string", param=place, code="invalid_type")
    return value


def _document(block: Json, place: str) -> str:
    given, where = block.get("source"), f"{place}.document.source"
    source: Json = given if isinstance(given, dict) else {}
    match source.get("type"):
        case "text":
            body = string(source, "data", where)
        case "content":
            body = _joined(source.get("content"), f"{where}.content")
        case _:
            raise BadRequest(
                f"{where}: documents come as text or content; no PDF is read here, and no files "
                "are kept",
                param=where,
            )
    return _lines(block.get("title"), block.get("context"), body)


def _joined(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place} must be a string or a list of blocks", param=place)
    texts = []
    for i, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            where = f"{place}.{i}"
            raise BadRequest(f"{where}: only text is read here", param=f"{where}.type")
        texts.append(string(block, "text", f"{place}.{i}"))
    return "\n".join(texts)


def _found(content: Any) -> str:
    """Returns titles and addresses of what another server found; its texts are encrypted."""
    results = content if isinstance(content, list) else [content]
    return "\n".join(
        _lines(result.get("title"), result.get("url"))
        for result in results
        if isinstance(result, dict)
    )


def _printed(content: Any) -> str:
    """Returns what a tool said: parts of it may be encrypted, or files that are kept elsewhere."""
    if isinstance(content, str):
        return content
    results = content if isinstance(content, list) else [content]
    return "\n".join(
        _lines(*(result.get(name) for name in ("text", "stdout", "stderr", "content")))
        for result in results
        if isinstance(result, dict)
    )


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)
