"""Says the tools of /v1/responses as functions, which models know.

    function                          as it is
    namespace                         its tools, each as NAMESPACE__NAME
    custom                            a function with one text, `input`
    local_shell, shell, apply_patch   functions of these names (`client_tools.py`)
    tool_search                       the same, if the client runs it (`tool_search.py`)

They come as the field `tools` and in items `additional_tools` of the input, which add to them: the
only place in which Codex sends those of its makers' newer models. A tool that an item has anew
takes the place of the one before. Results of searches add some, too. The client runs all of these.
Tools that the server would run are left out: a model that never learns of them does without, and
clients name some in every request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from decode_node.protocol.responses.client_tools import CLIENT_TOOLS
from decode_node.protocol.responses.lark_pattern import NoPattern, lark_pattern
from decode_node.protocol.responses.tool_search import CALL as SEARCH_CALL
from decode_node.protocol.responses.tool_search import (
    OUTPUT,
    is_of_client,
    search_function,
)
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
_KINDS = (
    "function, namespace, custom, local_shell, shell, apply_patch and tool_search of the client"
)


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
        found: Functions that a search has found, by the number of the item that tells them.
    """

    functions: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    called: dict[str, CalledTool] = field(default_factory=dict)
    found: dict[int, list[Json]] = field(default_factory=dict)
    _first_place: str = ""

    @classmethod
    def of(cls, tools: list[Json], items: str | list[Json] = "") -> ResponseTools:
        """Reads the fields `tools` and `input`. Raises `BadRequest` for a kind that nothing knows,
        and where nothing is left."""
        found = cls()
        found._add_all(tools, "tools")
        for i, item in enumerate([] if isinstance(items, str) else items):
            if item.get("type") == ADDITIONAL:
                first = len(found.functions)
                found._add_all(item.get("tools"), f"input.{i}.tools")
                found._drop_those_of_before(first)
            elif item.get("type") == OUTPUT and is_of_client(item):
                found._take_found(item, i)
        if found.left_out and not found.functions:
            place = found._first_place
            raise BadRequest(
                f"{place}: this server runs no tools, and {', '.join(sorted(set(found.left_out)))} "
                f"would run on it; tools can be {_KINDS}, which the client runs",
                param=f"{place}.0.type",
            )
        return found

    @property
    def hidden(self) -> frozenset[str]:
        """Returns the names of functions that stand in the result of a search alone."""
        found = [id(one) for some in self.found.values() for one in some]
        return frozenset(
            one["function"]["name"] for one in self.functions if id(one) in found and _named(one)
        )

    def called_tool(self, function: str) -> CalledTool:
        """Returns how a call of a function is sent."""
        return self.called.get(function) or CalledTool("function_call", function)

    def _add_all(self, tools: Any, place: str) -> None:
        for i, tool in enumerate(_tools(tools, place)):
            self._first_place = self._first_place or place
            self._add(tool, f"{place}.{i}")

    def _drop_those_of_before(self, first: int) -> None:
        """Leaves out functions before the number `first` whose names come from it on again."""
        renewed = {_named(one) for one in self.functions[first:]}
        self._keep([i >= first or _named(one) not in renewed for i, one in self._numbered()])

    def _take_found(self, item: Json, number: int) -> None:
        """Adds what a search has found. What was there before stays where it is shown."""
        first = len(self.functions)
        known = {_named(one) for one in self.functions}
        self._add_all(item.get("tools"), f"input.{number}.tools")
        self.found[number] = self.functions[first:]
        self._keep([i < first or _named(one) not in known for i, one in self._numbered()])

    def _numbered(self) -> Iterable[tuple[int, Json]]:
        return enumerate(self.functions)

    def _keep(self, is_kept: list[bool]) -> None:
        self.functions = list(compress(self.functions, is_kept))
        self.places = list(compress(self.places, is_kept))

    def _add(self, tool: Any, place: str, namespace: str = "") -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        add = self._adders().get(kind) if isinstance(kind, str) else None
        if isinstance(kind, str) and _is_of_server(tool):
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
            "tool_search": self._add_search,
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

    def _add_search(self, tool: Json, place: str, namespace: str) -> None:
        self._take(search_function(tool), place, namespace, SEARCH_CALL)

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


def _named(function: Json) -> str:
    """Returns the name of a function, if it has one: what is no text is refused later."""
    name = function["function"].get("name")
    return name if isinstance(name, str) else ""


def _is_of_server(tool: Json) -> bool:
    is_of_kind = tool["type"].startswith(_OF_SERVERS) and not is_of_client(tool)
    return is_of_kind or _is_in_container(tool)


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
