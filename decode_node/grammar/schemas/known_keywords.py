"""Writes schemas with the keywords that the library has, where another says the same with them.

    propertyNames of a list of names     properties, and no others
    propertyNames with a pattern         patternProperties, and no others
    patternProperties of listed names    properties
    propertyNames of any string, uniqueItems: false       nothing: they ask for nothing
    format of a name of their own beside a pattern        the pattern
    a large multipleOf of few numbers    enum
    $id to which nothing refers          nothing; the library wants it to be a URI

Zod and pydantic write these for records, dictionaries and formats like `cuid2`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from decode_node.grammar.schemas.multiples import MULTIPLE, listed_multiples, together
from decode_node.grammar.schemas.schema_checks import MAX_BYTES, subschemas, unfollowed_keywords
from decode_node.protocol.bodies.known_patterns import is_known_pattern

_NAMES, _UNIQUE, _FORMAT = "propertyNames", "uniqueItems", "format"
_PATTERNS = "patternProperties"
_ID, _REFERENCES = "$id", {"$ref", "$dynamicRef"}
_CHANGED = {_NAMES, _UNIQUE, _FORMAT, _PATTERNS, MULTIPLE, _ID}
_LISTED_NAMES = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$")
"""Matches a pattern of one name, or of several in brackets."""
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    *("byte", "binary", "password"),
}
"""Formats that are kept; of others only a pattern can say what they are."""
_NOTES = {"title", "description", "$comment", "default", "examples", "deprecated"}
"""Keywords that say nothing about a document."""
_LISTS = ("properties", "patternProperties")
_MAX_REFERENCES = 8


def with_known_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema that means the same. What the library's keywords cannot say stays, for it to
    be refused by its name."""
    if not any(part.keys() & _CHANGED for _, part in subschemas(schema)):
        return dict(schema)
    changed = copy.deepcopy(dict(schema))
    changed.pop(_ID, None)
    has_references = any(part.keys() & _REFERENCES for _, part in subschemas(changed))
    for _, part in list(subschemas(changed)):
        if not has_references:
            part.pop(_ID, None)
        if part.get(_UNIQUE) is False:
            del part[_UNIQUE]
        form = part.get(_FORMAT)
        if isinstance(form, str) and form not in _FORMATS and isinstance(part.get("pattern"), str):
            del part[_FORMAT]
        if _NAMES in part:
            _replace_names(part, changed)
        if isinstance(part.get(_PATTERNS), dict):
            _list_patterns(part)
        if (listed := listed_multiples(part)) is not None:
            part.clear()
            part |= listed
    return changed


def without_unknown_patterns(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema that allows more: texts whose pattern the library does not have are any."""
    if not any(_has_unknown_pattern(part) for _, part in subschemas(schema)):
        return dict(schema)
    changed = copy.deepcopy(dict(schema))
    for _, part in subschemas(changed):
        if _has_unknown_pattern(part):
            del part["pattern"]
    return changed


def without_unfollowed_numbers(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema that allows more: what answers could not be held to is left out."""
    if not any(unfollowed_keywords(part) for _, part in subschemas(schema)):
        return dict(schema)
    changed = copy.deepcopy(dict(schema))
    for _, part in subschemas(changed):
        for keyword in unfollowed_keywords(part):
            for one in together(part) if keyword == MULTIPLE else (part,):
                one.pop(keyword, None)
    return changed


def _has_unknown_pattern(part: Mapping[str, Any]) -> bool:
    pattern = part.get("pattern")
    return isinstance(pattern, str) and not is_known_pattern(pattern)


def _replace_names(part: dict[str, Any], root: Mapping[str, Any]) -> None:
    names = _resolved(part[_NAMES], root)
    if names is True:
        names = {}
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    said = names.keys() - _NOTES - {"type"}
    if not said:
        del part[_NAMES]
        return
    if any(part.get(keyword) for keyword in _LISTS):
        return
    value = part.get("additionalProperties", True)
    listed = _listed(said, names)
    keyword = "patternProperties" if said == {"pattern"} else "properties"
    if listed is not None and len(listed) * len(msgspec.json.encode(value)) <= MAX_BYTES:
        del part[_NAMES]
        part |= {keyword: dict.fromkeys(listed, value), "additionalProperties": False}


def _list_patterns(part: dict[str, Any]) -> None:
    """Makes properties of patterns that only list names. The library would look for more names that
    match, and find none amid an answer."""
    for pattern, schema in list(part[_PATTERNS].items()):
        found = _LISTED_NAMES.fullmatch(pattern)
        properties = part.setdefault("properties", {})
        if found is None or not isinstance(properties, dict):
            continue
        del part[_PATTERNS][pattern]
        for name in (found[1] or found[2]).split("|"):
            if properties.setdefault(name, schema) != schema:
                properties[name] = {"allOf": [properties[name], schema]}
    if not part[_PATTERNS]:
        del part[_PATTERNS]


def _listed(said: set[str], names: Mapping[str, Any]) -> list[str] | None:
    """Returns the names, or the pattern of them, that are all that `names` allows; None where it
    says more."""
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return [names["pattern"]]
    if said == {"enum"} and isinstance(names["enum"], list):
        return [name for name in names["enum"] if isinstance(name, str)]
    if said == {"const"} and isinstance(names["const"], str):
        return [names["const"]]
    return None


def _resolved(names: Any, root: Mapping[str, Any]) -> Any:
    """Returns what a schema of names says, which may be a reference alone."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(names, dict) or not isinstance(names.get("$ref"), str):
            return names
        if names.keys() - _NOTES != {"$ref"} or not names["$ref"].startswith("#/"):
            return None
        steps = names["$ref"][2:].split("/")
        names = root
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            names = names.get(step) if isinstance(names, Mapping) else None
    return None
