"""Searches of tools by the client: `tool_search` with `execution: client`.

    tool_search          a function of this name, with the client's own description and parameters
    tool_search_call     `arguments`, an object
    tool_search_output   `tools` that can be called from there on; as a result it tells them

The tools that were found stand in that result alone. The prompt before it stays as it was, so what
is cached of it serves. A search that a server would run is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from decode_node.protocol.responses.client_tools import read_arguments

Json = dict[str, Any]

TOOL = "tool_search"
CALL = "tool_search_call"
OUTPUT = "tool_search_output"
_PARAMETERS: Json = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool must do."}},
    "required": ["query"],
    "additionalProperties": False,
}


def is_of_client(one: Json) -> bool:
    """Says whether a tool, a call or an output is of a search that the client runs."""
    kind, execution = one.get("type"), one.get("execution")
    if kind not in (TOOL, CALL, OUTPUT):
        return False
    # Calls and outputs need not say so, but those that a server ran name no call.
    is_named = kind != TOOL and execution is None and isinstance(one.get("call_id"), str)
    return execution == "client" or is_named


def search_function(tool: Json) -> Json:
    """Returns the function by which the model searches."""
    return {
        "name": TOOL,
        "description": tool.get("description") or "Finds tools that can be called then.",
        "parameters": tool.get("parameters") or _PARAMETERS,
    }


@dataclass(frozen=True, slots=True)
class SearchTool:
    """Says how calls of a search are sent, as `ClientTool` does for tools that define theirs."""

    name: str = TOOL
    call: str = CALL
    prefix: str = "tsc"

    def fields(self, text: str) -> Json | None:
        """Returns the fields of a call with these arguments; None if they are no object."""
        given = read_arguments(text)
        return None if given is None else {"execution": "client", "arguments": given}


def found_text(functions: Iterable[Json]) -> str:
    """Returns what a search has found, as the model reads it."""
    found = [json.dumps(one["function"], ensure_ascii=False) for one in functions]
    return "\n".join(["These tools can be called now:", *found]) if found else "No tool was found."
