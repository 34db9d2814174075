"""Tools of /v1/responses whose calls have fields of their own; the client runs them.

    local_shell      local_shell_call    action: one command, as a list of words
    shell            shell_call          action: commands, as lines
    apply_patch      apply_patch_call    operation: a file to create, update or delete

To the model each is a function whose arguments are these fields. `fields` makes a call's fields of
arguments, and `arguments` is its reverse, for calls in the history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class ClientTool:
    """Describes one tool.

    Attributes:
        call: The type of its calls. That of their results ends in `_output`.
        place: The field of a call that holds the arguments.
        fixed: What that field has besides.
        optional: Arguments that may be missing, with what stands for them then.
    """

    name: str
    call: str
    prefix: str
    place: str
    description: str
    parameters: Json
    fixed: Mapping[str, Any]
    optional: Mapping[str, Any]

    @property
    def function(self) -> Json:
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }

    def fields(self, text: str) -> Json | None:
        """Returns the fields of a call with these arguments; None if they are not valid."""
        given = read_arguments(text)
        if given is None or not all(
            _is_of(given.get(name), self.parameters["properties"][name])
            for name in self.parameters["required"]
        ):
            return None
        known = {k: v for k, v in given.items() if k in self.parameters["properties"]}
        return {self.place: {**self.fixed, **self.optional, **known}}

    def arguments(self, item: Json) -> Json | None:
        """Returns the arguments of a call in the history; None where it has none."""
        held = item.get(self.place)
        if not isinstance(held, dict):
            return None
        known = self.parameters["properties"]
        return {k: v for k, v in held.items() if k in known and v not in (None, {})}


def read_arguments(text: str) -> Json | None:
    """Returns the object that a text is; None for any other, and for one with numbers that JSON
    does not have: they could not be sent."""
    try:
        given = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def _finite(text: str) -> float:
    """Returns a number. Raises `ValueError` for `NaN`, `Infinity` and what is as large."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


def _is_of(value: Any, schema: Json) -> bool:
    """Says whether a value is what one of the required properties demands."""
    if schema["type"] == "array":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    return isinstance(value, str) and value in schema.get("enum", [value])


_TOOLS = (
    ClientTool(
        name="local_shell",
        call="local_shell_call",
        prefix="lsh",
        place="action",
        description="Runs one command on the user's computer and returns what it prints.",
        parameters=_object(
            ("command",),
            command={
                "type": "array",
                "items": _TEXT,
                "minItems": 1,
                "description": 'The program and its arguments, such as ["ls", "-l"].',
            },
            working_directory={**_TEXT, "description": "The folder in which it runs."},
            timeout_ms={**_COUNT, "description": "Milliseconds after which it is ended."},
            env={
                "type": "object",
                "additionalProperties": _TEXT,
                "description": "Environment variables to set.",
            },
            user={**_TEXT, "description": "The user as whom it runs."},
        ),
        fixed={"type": "exec"},
        optional={"env": {}, "timeout_ms": None, "user": None, "working_directory": None},
    ),
    ClientTool(
        name="shell",
        call="shell_call",
        prefix="sh",
        place="action",
        description="Runs commands in a shell and returns what they print.",
        parameters=_object(
            ("commands",),
            commands={
                "type": "array",
                "items": _TEXT,
                "minItems": 1,
                "description": "Command lines, each run in the shell.",
            },
            timeout_ms={**_COUNT, "description": "Milliseconds after which they are ended."},
            max_output_length={**_COUNT, "description": "The most characters of output."},
        ),
        fixed={},
        optional={"timeout_ms": None, "max_output_length": None},
    ),
    ClientTool(
        name="apply_patch",
        call="apply_patch_call",
        prefix="apc",
        place="operation",
        description="Creates, changes or deletes one file.",
        parameters=_object(
            ("type", "path"),
            type={**_TEXT, "enum": ["create_file", "update_file", "delete_file"]},
            path={**_TEXT, "description": "The file."},
            diff={
                **_TEXT,
                "description": "Lines with + in front for a new file. For a change: @@ and the "
                "place, then lines with a blank, - or + in front. Nothing for a deletion.",
            },
        ),
        fixed={},
        optional={},
    ),
)
CLIENT_TOOLS = {tool.name: tool for tool in _TOOLS}
TOOLS_BY_CALL = {tool.call: tool for tool in _TOOLS}


def output_text(output: Any) -> str | None:
    """Returns what commands of a `shell_call_output` printed, and how they ended; None if it is no
    list of that."""
    if not isinstance(output, list) or not all(isinstance(one, dict) for one in output):
        return None
    return "\n".join(_ended(one) for one in output)


def _ended(command: Json) -> str:
    printed = "".join(str(command.get(name) or "") for name in ("stdout", "stderr"))
    given = command.get("outcome")
    outcome: Json = given if isinstance(given, dict) else {}
    if outcome.get("type") == "timeout":
        return f"{printed}\n(timed out)"
    if code := outcome.get("exit_code"):
        return f"{printed}\n(exit code {code})"
    return printed
