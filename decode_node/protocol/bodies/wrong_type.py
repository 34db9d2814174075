"""Says what the types of a body have wrong, in the words of JSON and of the API's fields.

The validator names Python's types ("a valid dictionary or instance of StreamOptions"), and of a
field with several types once for each. Clients read `stop must be a string or a list, not a
number`. Their values are not repeated.
"""

from __future__ import annotations

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from decode_node.protocol.bodies.body import MAX_STRING
from edge.http.errors import BadRequest

_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}


def describe(error: ValidationError, content: object) -> BadRequest:
    """Returns the most exact fault of a body, with the place as `messages.0.content`.

    Args:
        content: What was validated.
    """
    faults = error.errors(include_url=False)
    places = [_place(fault, content) for fault in faults]
    place = max(places, key=len)
    here = [fault for fault, its in zip(faults, places, strict=True) if its == place]
    param = ".".join(place)[:MAX_STRING]
    if here[0]["type"] == "missing":
        return BadRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    return BadRequest(f"{param} {_requirement(here)}", param=param, code="invalid_type")


def _place(fault: ErrorDetails, content: object) -> list[str]:
    """Returns the keys and indices that lead to a fault. The validator puts members of unions
    among them, which the content does not have."""
    found: list[str] = []
    value = content
    for part in fault["loc"]:
        match value:
            case dict() if part in value:
                value = value[part]
            case list() if isinstance(part, int) and part < len(value):
                value = value[part]
            case _:
                continue
        found.append(str(part))
    if fault["type"] == "missing":
        found.append(str(fault["loc"][-1]))
    return found


def _requirement(faults: list[ErrorDetails]) -> str:
    """Returns what a field must be, where several faults are of the types that it may have."""
    texts = [fault["ctx"]["expected"] for fault in faults if fault["type"] == "literal_error"]
    types = dict.fromkeys(_WANTED[f["type"]] for f in faults if f["type"] in _WANTED)
    if texts or types:
        found = "" if texts else f", not {_json_type(faults[0]['input'])}"
        return f"must be {' or '.join([*types, *texts])}{found}"
    fault = faults[0]
    match fault["type"]:
        case "too_short":
            return "must not be empty"
        case "too_long":
            return f"must have at most {fault['ctx']['max_length']} items"
        case _:
            return re.sub("^(Input|String) should ", "must ", fault["msg"])


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int():
            return "an integer"
        case float():
            return "a number with a fraction"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
