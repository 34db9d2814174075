"""Reads the tools that a request offers, and how the model may choose among them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edge.http.errors import BadRequest

MAX_TOOLS = 256
MAX_TOOL_NAME = 128

ChoiceMode = Literal["none", "auto", "required", "named"]
_MODES = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments; without one there are none, as the API has it.
        strict: Arguments must follow the schema, so that the output is constrained to it.
        raw: The tool as the client wrote it, for the template.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    raw: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Says what a request may call.

    Attributes:
        tools: All that it may call; empty where it offers none.
        mode: `none` where it may not call any, `named` where it must call `name`.
        is_parallel: One answer may hold several calls.
        shown: What the template shows: all but tools that the turns so far have introduced, and
            also those that may not be called now, so that the prompt stays as it was.
    """

    tools: tuple[Tool, ...] = ()
    mode: ChoiceMode = "none"
    name: str = ""
    is_parallel: bool = True
    shown: tuple[Tool, ...] = ()

    @property
    def must_call(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def may_call(self) -> bool:
        return self.mode != "none"

    @property
    def is_limited(self) -> bool:
        """Says whether the template shows tools that may not be called."""
        callable_ = {tool.name for tool in self.tools}
        return any(tool.name not in callable_ for tool in self.shown)

    def hiding(self, names: Collection[str]) -> ToolUse:
        """Returns the same without tools of these `names` in what the template shows."""
        return replace(self, shown=tuple(tool for tool in self.shown if tool.name not in names))

    def without(self, names: Collection[str]) -> ToolUse:
        """Returns the same without calls of tools of these `names`, which are still shown. Raises
        `BadRequest` where one of them must be called."""
        left = tuple(tool for tool in self.tools if tool.name not in names)
        if self.name in names or (self.must_call and not left):
            message = "tool_choice wants a tool that the turns have withdrawn"
            raise BadRequest(message, param="tool_choice")
        return replace(self, tools=left, mode=self.mode if left else "none")

    def without_lax_schemas(self) -> ToolUse:
        """Returns the same with any arguments for tools that are not strict."""
        return replace(
            self,
            tools=tuple(
                tool if tool.strict else replace(tool, parameters={"type": "object"})
                for tool in self.tools
            ),
        )


def read_tools(tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
    """Reads the fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises `BadRequest`."""
    known = _read_list(tools)
    may_call = known
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        may_call, choice = _read_allowed(choice.get("allowed_tools"), known)
    mode, name = _read_choice(choice, may_call)
    return ToolUse(may_call, mode, name, is_parallel=parallel is not False, shown=known)


def _read_list(tools: Any) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools", code="invalid_type")
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(tools)}, more than {MAX_TOOLS}", param="tools")
    found = tuple(_read_tool(tool, f"tools.{i}") for i, tool in enumerate(tools))
    seen: set[str] = set()
    for i, tool in enumerate(found):
        if tool.name in seen:
            place = f"tools.{i}.function.name"
            raise BadRequest(f"{place}: a tool of this name is there already", param=place)
        seen.add(tool.name)
    return found


def _read_tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, dict):
        raise BadRequest(f"{place} must be an object", param=place, code="invalid_type")
    if tool.get("type") not in (None, "function"):
        place = f"{place}.type"
        raise BadRequest(f"{place}: only tools of type function are supported", param=place)
    function = tool.get("function")
    if not isinstance(function, dict):
        place = f"{place}.function"
        raise BadRequest(f"{place} must be an object", param=place, code="invalid_type")
    parameters = _optional(function, "parameters", dict, f"{place}.function")
    return Tool(
        name=tool_name(function.get("name"), f"{place}.function.name"),
        parameters=_NO_PARAMETERS if parameters is None else parameters,
        strict=bool(_optional(function, "strict", bool, f"{place}.function")),
        raw=tool,
    )


def tool_name(value: Any, place: str) -> str:
    """Returns the name of a function. Raises `BadRequest` for what is none."""
    if not isinstance(value, str):
        raise BadRequest(f"{place} must be a string", param=place, code="invalid_type")
    if not 0 < len(value) <= MAX_TOOL_NAME or _CONTROL.search(value):
        raise BadRequest(
            f"{place} must have 1 to {MAX_TOOL_NAME} characters, and no control characters",
            param=place,
        )
    return value


def _optional(function: dict[str, Any], key: str, kind: type, place: str) -> Any:
    value = function.get(key)
    if value is not None and not isinstance(value, kind):
        name = {dict: "an object", bool: "true or false"}[kind]
        raise BadRequest(
            f"{place}.{key} must be {name}", param=f"{place}.{key}", code="invalid_type"
        )
    return value


def _read_choice(choice: Any, tools: Sequence[Tool]) -> tuple[ChoiceMode, str]:
    if choice is None:
        return ("auto" if tools else "none"), ""
    if choice == "none" or (choice == "auto" and not tools):
        return "none", ""
    if not tools:
        raise BadRequest(
            "tool_choice needs tools; send them, or leave tool_choice out", param="tool_choice"
        )
    if choice == "any":  # Mistral's word, and so that of its clients.
        choice = "required"
    if choice in ("auto", "required"):
        return choice, ""
    name = _chosen_name(choice)
    if name not in [tool.name for tool in tools]:
        raise BadRequest(
            "tool_choice names a function that tools does not have", param="tool_choice"
        )
    return "named", name


def _read_allowed(allowed: Any, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], Any]:
    """Returns the tools that a choice of some allows, and how to choose among them."""
    place = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise BadRequest(f"{place} must have mode and a list of tools", param=place)
    if (mode := allowed.get("mode")) not in ("auto", "required"):
        raise BadRequest(f"{place}.mode must be auto or required", param=f"{place}.mode")
    names = {_function_name(one) for one in allowed["tools"]}
    if not names or names - {tool.name for tool in tools}:
        raise BadRequest(
            f"{place}.tools must name functions that tools has", param=f"{place}.tools"
        )
    return tuple(tool for tool in tools if tool.name in names), mode


def _chosen_name(choice: Any) -> str:
    if (name := _function_name(choice)) is not None:
        return name
    raise BadRequest(
        f"tool_choice must be one of {', '.join(_MODES)}, or "
        '{"type": "function", "function": {"name": ...}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        param="tool_choice",
    )


def _function_name(choice: Any) -> str | None:
    """Returns the name in `{"type": "function", "function": {"name": ...}}`; None if it is not
    that."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    return None
