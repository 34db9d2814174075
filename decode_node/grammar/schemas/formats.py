"""Formats of strings whose rules the library keeps only roughly, as exact patterns, and OpenAPI's,
which it does not know.

Its dates have 31 days in every month and its minutes a 61st second; its host names may be no names
at all. A date parser that reads an answer finds out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from decode_node.grammar.schemas.schema_checks import subschemas

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](\\.[0-9]{{1,9}})?([zZ]|[+-]{_HOUR_MINUTE})"
_A, _X = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_LABEL = f"{_A}({_A}|{_X}{_A}|{_X}{{2}}{_A}|{_X}({_A}{_X}|-{_A}){_X}{{0,58}}{_A})?"
"""A part of a host name: 63 letters, digits and hyphens at most, no hyphen at either end or in both
of places 3 and 4, which is for names in other scripts."""

_EXACT: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"pattern": f"^{_LABEL}(\\.{_LABEL})*$", "maxLength": 253},
    "byte": {"pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
    # These two say how a text is meant, and nothing of how it looks.
    "binary": {},
    "password": {},
}


def with_exact_formats(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema that means the same, where the library would be lax."""
    found = [part for _, part in subschemas(schema) if _is_lax(part)]
    if not found:
        return dict(schema)
    changed = copy.deepcopy(dict(schema))
    for _, part in subschemas(changed):
        if _is_lax(part):
            exact = _EXACT[part.pop("format")]
            if exact.keys() & part.keys():
                part["allOf"] = [*part.get("allOf", ()), exact]
            else:
                part.update(exact)
    return changed


def _is_lax(part: Mapping[str, Any]) -> bool:
    form = part.get("format")
    return isinstance(form, str) and form in _EXACT and isinstance(part.get("allOf", []), list)
