"""Decides whether a grammar can hold numbers to `multipleOf`.

The grammar library follows remainders by an automaton with a state for each, and intersects it with
the numbers up to `maximum`. Whether some number can still be reached is then a search that grows
with the multiple: beyond `_MOST` it is given up in the midst of an answer (llguidance 1.9.1).

    no maximum, or small multiples    followed
    few numbers in the range          listed, as an enum
    no number in the range            refused, as are all others
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

MULTIPLE = "multipleOf"
_MOST = 2000
"""Values of which all were followed to their ends; the first that was not is 2500."""
_MOST_LISTED = 512
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_KINDS = {"integer", "number", "null"}
_FINITE = {"enum", "const"}


def fault_of_multiple(part: Mapping[str, Any]) -> str:
    """Returns why numbers of one schema cannot be held to their multiple; "" where they can, and
    where `listed_multiples` says the same with a list."""
    step = _step(part)
    if step is None:
        return ""
    least, most = _range(part, step)
    if least is not None and most is not None:
        if least > most:
            return "has no number between minimum and maximum"
        if _may_list(part, most - least + 1):
            return ""
    return (
        f"of more than {_MOST} beside a maximum can only be followed where the type is integer or "
        f"number, and at most {_MOST_LISTED} numbers are in the range; leave one of the two out"
    )


def listed_multiples(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a schema that lists the numbers of this one, where only that can be followed."""
    step = _step(part)
    if step is None:
        return None
    least, most = _range(part, step)
    if least is None or most is None or not _may_list(part, most - least + 1):
        return None
    values = [_number(step * factor) for factor in range(least, most + 1)]
    kept = {key: value for key, value in part.items() if key not in {MULTIPLE, *_LOW, *_HIGH}}
    return kept | {"enum": [*values, *([None] if "null" in _kinds(part) else [])]}


def _step(part: Mapping[str, Any]) -> Fraction | None:
    """Returns the distance of the numbers of a schema that cannot be followed as it is."""
    parts = list(together(part))
    if any(_FINITE & one.keys() for one in parts):
        return None
    steps = [found for one in parts if (found := _exact(one.get(MULTIPLE))) and found > 0]
    if not steps or not any(_exact(one.get(key)) is not None for one in parts for key in _HIGH):
        return None
    step = steps[0]
    for other in steps[1:]:
        common = math.lcm(step.denominator, other.denominator)
        step = Fraction(math.lcm(int(step * common), int(other * common)), common)
    if "number" not in _kinds(part) and "integer" in _kinds(part):
        step = Fraction(step.numerator)
    return step if step > _MOST else None


def together(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a schema and those that must all be followed with it."""
    waiting: list[Any] = [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            also = one.get("allOf")
            waiting += also if isinstance(also, list) else []


def _range(part: Mapping[str, Any], step: Fraction) -> tuple[int | None, int | None]:
    """Returns the least and the largest factor of `step`; None for no bound."""
    lows, highs = [], []
    for one in together(part):
        if (low := _exact(one.get("minimum"))) is not None:
            lows.append(math.ceil(low / step))
        if (low := _exact(one.get("exclusiveMinimum"))) is not None:
            lows.append(math.floor(low / step) + 1)
        if (high := _exact(one.get("maximum"))) is not None:
            highs.append(math.floor(high / step))
        if (high := _exact(one.get("exclusiveMaximum"))) is not None:
            highs.append(math.ceil(high / step) - 1)
    return max(lows, default=None), min(highs, default=None)


def _may_list(part: Mapping[str, Any], count: int) -> bool:
    kinds = _kinds(part)
    return "allOf" not in part and bool(kinds) and kinds <= _KINDS and count <= _MOST_LISTED


def _kinds(part: Mapping[str, Any]) -> set[str]:
    kinds = part.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {kind for kind in listed if isinstance(kind, str)}


def _exact(value: Any) -> Fraction | None:
    """Returns the number as it is written; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return Fraction(repr(value))


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
