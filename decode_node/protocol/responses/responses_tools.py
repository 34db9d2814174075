"""Says the tools of /v1/responses as functions, which models know.

    function                          as it is
    namespace                         its tools, each as NAMESPACE__NAME
    custom                            a function with one text, `input`
    local_shell, shell, apply_patch   functions of these names (`client_tools.py`)

They come as the field `tools` and in items `additional_tools` of the input, which add to them: the
only place in which Codex sends those of its makers' newer models. A tool that an item has anew
takes the place of the one before. The client runs all of these. Tools that the server would run are
left out: a model that never learns of them does without, and clients name some in every request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode_node.protocol.responses.client_tools import CLIENT_TOOLS
from decode_node.protocol.responses.lark_pattern import NoPattern, lark_pattern
from edge.http.errors import BadRequest

Json = dict[str, Any]

ADDITIONAL = "additional_tools"
"""The type of an item that has tools."""
INPUT = "input"
"""The argument of a custom tool's function."""
_MAX_KIND = 64
_OF_SERVERS = (
    "web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer",
    "tool_search", "programmatic_tool_calling",
)  # fmt: skip
"""Beginnings of the types of tools that a server runs, or that need a screen. Some are dated."""
_KINDS = "function, namespace, custom, local_shell, shell and apply_patch"


def flat_name(namespace: Any, name: str) -> str:
    """Returns the name by which the model calls a tool of a namespace."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


@dataclass(frozen=True, slots=True)
class CalledTool:
    """Says how a call of one function is sent: `call` is the type of its item."""

    call: str
    name: str
    namespace: str = ""


@dataclass(slots=True)
class ResponseTools:
    """The tools of one request.

    Attributes:
        functions: As chats have them.
        places: Where the client wrote each of them.
        left_out: Types of tools that are not here.
        called: How calls are sent, by the function's name.
    """

    functions: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    called: dict[str, CalledTool] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: list[Json], items: str | list[Json] = "") -> ResponseTools:
        """Reads the fields `tools` and `input`. Raises `BadRequest` for a kind that nothing knows,
        and where nothing is left."""
        found = cls()
        lists = [("tools", tools)]
        for i, item in enumerate([] if isinstance(items, str) else items):
            if item.get("type") == ADDITIONAL:
                place = f"input.{i}.tools"
                lists.append((place, _tools(item.get("tools"), place)))
        for place, listed in lists:
            first = len(found.functions)
            for i, tool in enumerate(listed):
                found._add(tool, f"{place}.{i}")
            found._drop_those_of_before(first)
        if found.left_out and not found.functions:
            place = next(place for place, listed in lists if listed)
            raise BadRequest(
                f"{place}: this server runs no tools, and {', '.join(sorted(set(found.left_out)))} "
                f"would run on it; tools can be {_KINDS}, which the client runs",
                param=f"{place}.0.type",
            )
        return found

    def called_tool(self, function: str) -> CalledTool:
        """Returns how a call of a function is sent."""
        return self.called.get(function) or CalledTool("function_call", function)

    def _drop_those_of_before(self, first: int) -> None:
        """Leaves out functions before the place `first` whose names come behind it again."""
        renewed = {function["function"].get("name") for function in self.functions[first:]}
        for i in reversed(range(first)):
            if self.functions[i]["function"].get("name") in renewed:
                del self.functions[i], self.places[i]

    def _add(self, tool: Any, place: str, namespace: str = "") -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        add = self._adders().get(kind) if isinstance(kind, str) else None
        if isinstance(kind, str) and (kind.startswith(_OF_SERVERS) or _is_in_container(tool)):
            self.left_out.append(kind[:_MAX_KIND])
        elif add is None or (namespace and kind == "namespace"):
            raise BadRequest(f"{place}: tools can be {_KINDS}", param=f"{place}.type")
        else:
            add(tool, place, namespace)

    def _adders(self) -> dict[str, Callable[[Json, str, str], None]]:
        own = dict.fromkeys(CLIENT_TOOLS, self._add_client_tool)
        return {
            "function": self._add_function,
            "custom": self._add_custom,
            "namespace": self._add_namespace,
            **own,
        }

    def _add_namespace(self, tool: Json, place: str, _: str) -> None:
        name, tools = _name(tool, place), _tools(tool.get("tools"), f"{place}.tools")
        first = len(self.functions)
        for i, one in enumerate(tools):
            self._add(one, f"{place}.tools.{i}", name)
        if (about := tool.get("description")) and len(self.functions) > first:
            function = self.functions[first]["function"]
            function["description"] = _joined(about, function.get("description"))

    def _add_function(self, tool: Json, place: str, namespace: str) -> None:
        function = {k: v for k, v in tool.items() if k != "type" and v is not None}
        function.pop("defer_loading", None)
        self._take(function, place, namespace, "function_call")

    def _add_custom(self, tool: Json, place: str, namespace: str) -> None:
        form = tool.get("format") or {"type": "text"}
        kind = form.get("type") if isinstance(form, dict) else None
        if kind not in ("text", "grammar"):
            where = f"{place}.format"
            raise BadRequest(f"{where}.type must be text or grammar", param=f"{where}.type")
        text: Json = {"type": "string"}
        function: Json = {"name": tool.get("name"), "description": tool.get("description") or ""}
        if kind == "grammar":
            syntax, definition = _grammar(form, f"{place}.format")
            told = f"The input follows this grammar ({syntax}):\n{definition}"
            function["description"] = _joined(function["description"], told)
            if syntax == "lark":
                definition = _pattern(definition, f"{place}.format.definition")
            text["pattern"], function["strict"] = f"^(?:{definition})$", True
        function["parameters"] = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }
        self._take(function, place, namespace, "custom_tool_call")

    def _add_client_tool(self, tool: Json, place: str, namespace: str) -> None:
        own = CLIENT_TOOLS[tool["type"]]
        self._take(own.function, place, namespace, own.call)

    def _take(self, function: Json, place: str, namespace: str, call: str) -> None:
        name = function.get("name")
        if isinstance(name, str) and name:
            function = {**function, "name": flat_name(namespace, name)}
            self.called[function["name"]] = CalledTool(call, name, namespace)
        self.functions.append({"type": "function", "function": function})
        self.places.append(place)


def _is_in_container(tool: Json) -> bool:
    """Says whether a shell is one that the server keeps."""
    environment = tool.get("environment")
    kind = environment.get("type") if isinstance(environment, dict) else None
    return tool["type"] == "shell" and kind not in (None, "local")


def _grammar(form: Json, place: str) -> tuple[str, str]:
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex"):
        raise BadRequest(f"{place}.syntax must be lark or regex", param=f"{place}.syntax")
    if not isinstance(definition, str):
        where = f"{place}.definition"
        raise BadRequest(f"{where} must be a string", param=where, code="invalid_type")
    return syntax, definition


def _pattern(grammar: str, place: str) -> str:
    """Returns the regular expression that a Lark grammar is. Raises `BadRequest`."""
    try:
        return lark_pattern(grammar)
    except NoPattern as error:
        raise BadRequest(
            f"{place}: this grammar cannot be enforced: {error}", param=place
        ) from None


def _tools(given: Any, place: str) -> list[Json]:
    if not isinstance(given, list):
        raise BadRequest(f"{place} must be a list", param=place, code="invalid_type")
    return given


def _name(tool: Json, place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        where = f"{place}.name"
        raise BadRequest(f"{where} must be a string", param=where, code="invalid_type")
    return name


def _joined(*texts: Any) -> str:
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)
