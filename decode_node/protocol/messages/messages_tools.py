"""Says the tools of /v1/messages as functions, which models know.

    custom, or no type         as it is
    bash, text_editor, memory  functions with the input that the API defines for them; all dated
    anything else              runs on a server, or needs a screen: it is left out, and named

Tools with `defer_loading` are not shown at first. The client's own search of tools answers with
references to some, and then the turns show them (`messages_input.py`), so that the prompt before
stays as it was. Where the search is the server's, which has none, all are shown. Turns may also add
and withdraw tools (`tool_changes.py`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from decode_node.protocol.messages.tool_changes import check_known, tool_changes
from edge.http.errors import BadRequest

Json = dict[str, Any]

_MAX_KIND = 64
_OF_SERVERS = (
    "web_search_", "web_fetch_", "code_execution_", "computer_", "browser_", "tool_search_tool_",
    "mcp_toolset", "advisor_",
)  # fmt: skip
"""Beginnings of the types of tools that a server runs, or that need a screen."""
_TEXT = {"type": "string"}


def _commands(about: dict[str, str], **properties: Json) -> Json:
    told = "; ".join(f"{name}: {meaning}" for name, meaning in about.items())
    command = {**_TEXT, "enum": list(about), "description": told}
    return {
        "type": "object",
        "properties": {"command": command, **properties},
        "required": ["command"],
    }


_LINES: Json = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITS: Json = {
    "path": _TEXT,
    "view_range": {**_LINES, "description": "First and last line to view; -1 for the end."},
    "file_text": {**_TEXT, "description": "The content to create."},
    "old_str": {**_TEXT, "description": "The text to replace, which the file has once."},
    "new_str": {**_TEXT, "description": "The text in its place."},
    "insert_line": {"type": "integer", "description": "The line behind which to insert; 0: first."},
    "insert_text": {**_TEXT, "description": "The text to insert."},
}
_DEFINED: dict[str, tuple[str, Json]] = {
    "bash_": (
        "Runs a command in a bash session that keeps its state, and returns what it prints.",
        {
            "type": "object",
            "properties": {
                "command": {**_TEXT, "description": "The command line."},
                "restart": {"type": "boolean", "description": "Start the session anew."},
            },
        },
    ),
    "text_editor_": (
        "Views, creates and changes text files.",
        _commands(
            {
                "view": "shows a file or lists a folder",
                "create": "writes a new file",
                "str_replace": "replaces a text",
                "insert": "inserts a text behind a line",
            },
            **_EDITS,
        ),
    ),
    "memory_": (
        "Keeps notes in files under /memories, over conversations.",
        _commands(
            {
                "view": "shows a file or lists a folder",
                "create": "writes a file",
                "str_replace": "replaces a text",
                "insert": "inserts a text behind a line",
                "delete": "deletes a file or a folder",
                "rename": "gives a file or a folder another path",
            },
            **_EDITS,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}
"""Descriptions and input of tools that the API defines and clients run, by the type's beginning."""


@dataclass(slots=True)
class MessageTools:
    """The tools of one request.

    Attributes:
        functions: As chats have them, and of deferred ones those that are loaded.
        deferred: Functions that only references show, by name.
        left_out: Types of tools that are not here.
        places: Where the client wrote each function.
        removed: Names of functions that may not be called any more.
        unsaid: Names of tools that are not here: turns that change them say nothing.
    """

    functions: list[Json] = field(default_factory=list)
    deferred: dict[str, Json] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    unsaid: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tools: list[Json], turns: list[Json]) -> MessageTools:
        """Reads the field `tools`. `turns` may change what there is. Raises `BadRequest` for a
        kind that nothing knows, and where nothing is left."""
        found = cls()
        for i, tool in enumerate(tools):
            found._add(tool, f"tools.{i}")
        found._check_left_out("tools.0.type")
        if any(kind.startswith("tool_search_tool_") for kind in found.left_out):
            found.deferred = {}
        found._change(turns)
        return found

    def _check_left_out(self, place: str) -> None:
        """Raises `BadRequest` where there is nothing besides."""
        if self.left_out and not self.functions:
            raise BadRequest(
                "this server runs no tools and says none that need a screen, so nothing is left "
                f"beside {', '.join(sorted(set(self.left_out)))}; send custom tools, bash, "
                "text_editor or memory",
                param=place,
            )

    def _change(self, turns: list[Json]) -> None:
        """Applies what the turns say, and leaves out deferred tools that none of them names."""
        loaded, cut_off = set(), set()
        names = {_name(one) for one in self.functions} | self.unsaid
        defined: dict[str, tuple[Json, str]] = {}
        for change in tool_changes(turns):
            if change.definition is not None:
                defined[change.name] = change.definition, change.place
                names.add(change.name)
            check_known(change, names)
            if change.is_there:
                loaded.add(change.name)
                self.removed.discard(change.name)
            else:
                self.removed.add(change.name)
            if change.is_cut_off and change.is_there:
                cut_off.add(change.name)
            elif change.is_cut_off or change.definition is not None:
                cut_off.discard(change.name)
        self._drop(defined.keys())
        for definition, place in defined.values():
            self._add({**definition, "defer_loading": True}, place)
            self._check_left_out(f"{place}.type")
        self._drop(self.deferred.keys() - loaded)
        self.unsaid -= {name for one in self.functions if (name := _name(one)) is not None}
        # No turn shows these any more.
        for name in cut_off:
            self.deferred.pop(name, None)

    def _drop(self, names: Set[str]) -> None:
        kept = [
            (one, place)
            for one, place in zip(self.functions, self.places, strict=True)
            if _name(one) not in names
        ]
        self.functions = [one for one, _ in kept]
        self.places = [place for _, place in kept]

    def _add(self, tool: Json, place: str) -> None:
        kind = tool.get("type")
        defined = next((v for k, v in _DEFINED.items() if str(kind).startswith(k)), None)
        if isinstance(kind, str) and kind.startswith(_OF_SERVERS):
            self.left_out.append(kind[:_MAX_KIND])
            if isinstance(name := tool.get("name"), str):
                self.unsaid.add(name)
            return
        if kind not in (None, "custom") and defined is None:
            raise BadRequest(
                "only custom tools, bash, text_editor and memory are supported",
                param=f"{place}.type",
            )
        function: Json = {k: tool[k] for k in ("name", "description", "strict") if k in tool}
        if defined is not None:
            function = {"description": defined[0], **function, "parameters": defined[1]}
        elif (schema := tool.get("input_schema")) is not None:
            if not isinstance(schema, dict):
                where = f"{place}.input_schema"
                raise BadRequest(f"{where} must be an object", param=where, code="invalid_type")
            function["parameters"] = schema
        whole = {"type": "function", "function": function}
        if tool.get("defer_loading") is True and isinstance(function.get("name"), str):
            self.deferred[function["name"]] = whole
        self.functions.append(whole)
        self.places.append(place)


def _name(tool: Json) -> str | None:
    """Returns the name of a function, if it has one: what is no text is refused later."""
    name = tool["function"].get("name")
    return name if isinstance(name, str) else None
