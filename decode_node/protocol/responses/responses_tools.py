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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode_node.protocol.chat.tools import MAX_TOOLS, tool_name
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
_MAX_LISTED = 2 * MAX_TOOLS
"""Limit of tools in one list. Some of them may be left out."""
_MAX_IN_ALL = 64 * MAX_TOOLS
"""Limit of tools in all lists of a request. Some of them take the places of others."""
_OF_SERVERS = (
    "web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer",
    "tool_search", "programmatic_tool_calling",
)  # fmt: skip
"""Beginnings of the types of tools that a server runs, or that need a screen. Some are dated."""
_MAX_LARK = 1 << 20
"""Limit of characters of Lark grammars in a request: to read them takes a second."""
_OF_NAMESPACES = ("function", "custom")
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


@dataclass(frozen=True, slots=True)
class _Taken:
    """Holds one function as chats have it, where the client wrote it, and how calls are sent."""

    function: Json
    place: str
    called: CalledTool


@dataclass(slots=True)
class ResponseTools:
    """The tools of one request.

    Attributes:
        left_out: Types of tools that are not here.
        found: Functions that a search has found, by the number of the item that tells them.
    """

    left_out: list[str] = field(default_factory=list)
    found: dict[int, list[Json]] = field(default_factory=dict)
    _taken: dict[str, _Taken] = field(default_factory=dict)
    """Holds all of them by name; those that came last are at the end."""
    _hidden: set[str] = field(default_factory=set)
    _first_place: str = ""
    _num_listed: int = 0
    _num_lark: int = 0
    _of_list: dict[str, _Taken] = field(default_factory=dict)
    """Holds those of the list that is being read."""
    _is_result: bool = False
    """Says whether that list is the result of a search."""
    _about: Any = None
    """Says what the namespace that is being read is for, until a function of it does."""

    @classmethod
    def of(cls, tools: list[Json], items: str | list[Json] = "") -> ResponseTools:
        """Reads the fields `tools` and `input`. Raises `BadRequest` for a kind that nothing knows,
        for lists that are too long, and where nothing is left."""
        found = cls()
        found._take_list(tools, "tools")
        for i, item in enumerate([] if isinstance(items, str) else items):
            place = f"input.{i}.tools"
            if item.get("type") == ADDITIONAL:
                found._take_list(item.get("tools"), place)
            elif item.get("type") == OUTPUT and is_of_client(item):
                found._take_found(item.get("tools"), place, i)
        found._drop_oldest_found()
        if len(found._taken) > MAX_TOOLS:
            raise BadRequest(
                f"tools and {ADDITIONAL} have {len(found._taken)} functions, more than {MAX_TOOLS}",
                param="tools",
            )
        if found.left_out and not found._taken:
            place = found._first_place
            raise BadRequest(
                f"{place}: this server runs no tools, and {', '.join(sorted(set(found.left_out)))} "
                f"would run on it; tools can be {_KINDS}, which the client runs",
                param=f"{place}.0.type",
            )
        return found

    @property
    def functions(self) -> list[Json]:
        """Returns the functions as chats have them."""
        return [one.function for one in self._taken.values()]

    @property
    def places(self) -> list[str]:
        """Returns where the client wrote each of them."""
        return [one.place for one in self._taken.values()]

    @property
    def hidden(self) -> frozenset[str]:
        """Returns the names of functions that stand in the result of a search alone."""
        return frozenset(self._hidden)

    def called_tool(self, function: str) -> CalledTool:
        """Returns how a call of a function is sent."""
        taken = self._taken.get(function)
        return taken.called if taken else CalledTool("function_call", function)

    def _take_list(self, tools: Any, place: str) -> None:
        """Adds tools that are shown. They take the places of those of their names before."""
        for name, one in self._read(tools, place).items():
            self._taken.pop(name, None)
            self._taken[name] = one
            self._hidden.discard(name)

    def _take_found(self, tools: Any, place: str, number: int) -> None:
        """Adds what a search has found. What was there before stays as it is."""
        self._is_result = True
        found = self._read(tools, place)
        self._is_result = False
        self.found[number] = [one.function for one in found.values()]
        for name, one in found.items():
            if name not in self._taken:
                self._hidden.add(name)
            if name in self._hidden:
                self._taken[name] = self._taken.pop(name, one)

    def _drop_oldest_found(self) -> None:
        """Leaves out functions beyond the limit that were found longest ago. The results of their
        searches go on to tell them."""
        found = [name for name in self._taken if name in self._hidden]
        for name in found[: max(0, len(self._taken) - MAX_TOOLS)]:
            del self._taken[name]
            self._hidden.discard(name)

    def _read(self, tools: Any, place: str) -> dict[str, _Taken]:
        """Returns the functions of a list, by name."""
        self._of_list = {}
        listed = _tools(tools, place)
        self._check_length(listed, place)
        for i, tool in enumerate(listed):
            self._first_place = self._first_place or place
            self._add(tool, f"{place}.{i}")
        return self._of_list

    def _check_length(self, tools: list[Any], place: str) -> None:
        """Raises `BadRequest` before anything is done with what are too many tools."""
        number = sum(_num_tools(tool) for tool in tools)
        if number > _MAX_LISTED:
            raise BadRequest(
                f"{place} has {number} tools, namespaces included, more than {_MAX_LISTED}",
                param=place,
            )
        self._num_listed += number
        if self._num_listed > _MAX_IN_ALL:
            raise BadRequest(
                f"{place}: items have more than {_MAX_IN_ALL} tools in all; leave out older ones",
                param=place,
            )

    def _add(self, tool: Any, place: str, namespace: str = "") -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        add = self._adders().get(kind) if isinstance(kind, str) else None
        if isinstance(kind, str) and _is_of_server(tool):
            self.left_out.append(kind[:_MAX_KIND])
        elif namespace and kind not in _OF_NAMESPACES:
            where = f"{place}.type"
            raise BadRequest(
                f"{where}: tools of a namespace can be {' and '.join(_OF_NAMESPACES)}; send others "
                "beside it",
                param=where,
            )
        elif add is None:
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
        self._about = tool.get("description")
        for i, one in enumerate(tools):
            self._add(one, f"{place}.tools.{i}", name)
        self._about = None

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
                definition = self._pattern(definition, f"{place}.format.definition")
            text["pattern"], function["strict"] = f"^(?:{definition})$", True
        function["parameters"] = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }
        self._take(function, place, namespace, "custom_tool_call")

    def _pattern(self, grammar: str, place: str) -> str:
        """Returns the regular expression that a Lark grammar is. Raises `BadRequest`."""
        self._num_lark += len(grammar)
        if self._num_lark > _MAX_LARK:
            raise BadRequest(
                f"{place}: tools have Lark grammars of more than {_MAX_LARK} characters in all; "
                "send fewer",
                param=place,
            )
        try:
            return lark_pattern(grammar)
        except NoPattern as error:
            raise BadRequest(
                f"{place}: this grammar cannot be enforced: {error}", param=place
            ) from None

    def _add_search(self, tool: Json, place: str, namespace: str) -> None:
        self._take(search_function(tool), place, namespace, SEARCH_CALL)

    def _add_client_tool(self, tool: Json, place: str, namespace: str) -> None:
        own = CLIENT_TOOLS[tool["type"]]
        self._take(own.function, place, namespace, own.call)

    def _take(self, function: Json, place: str, namespace: str, call: str) -> None:
        own = function.get("name")
        whole_name = flat_name(namespace, own) if own and isinstance(own, str) else own
        name = tool_name(whole_name, f"{place}.name")
        if name in self._of_list:
            if self._is_result:
                return
            where = f"{place}.name"
            raise BadRequest(f"{where}: a tool of this name is there already", param=where)
        function = {**function, "name": name}
        if self._about:
            function["description"] = _joined(self._about, function.get("description"))
            self._about = None
        whole: Json = {"type": "function", "function": function}
        self._of_list[name] = _Taken(whole, place, CalledTool(call, str(own), namespace))


def _num_tools(tool: Any) -> int:
    """Returns the number of tools that one is, those of a namespace for it."""
    own = tool.get("tools") if isinstance(tool, dict) else None
    return max(1, len(own)) if isinstance(own, list) else 1


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
