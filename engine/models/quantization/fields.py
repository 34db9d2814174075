"""The fields of a `quantization_config`, each read once; what nobody reads is refused by name."""

from __future__ import annotations

import fnmatch
import re
from typing import TypeVar

import msgspec

from engine.models.specs.base import UnsupportedField

SUPPORTED = (
    "use a checkpoint in FP8 (block, channel or tensor scales), AWQ, GPTQ, AutoRound or "
    "compressed-tensors with 4-bit groups, MXFP4, or without quantisation"
)

_T = TypeVar("_T")


class Fields:
    """Wraps one JSON object of a config file.

    Args:
        place: Its name in the file, like "quantization_config".
    """

    def __init__(self, place: str, values: dict[str, object]) -> None:
        self.place = place
        self._values = {name: value for name, value in values.items() if value is not None}
        self._unread = set(self._values)

    def refused(self, name: str, what: str) -> UnsupportedField:
        """Returns the error of a field that asks for what is not here."""
        return UnsupportedField(f"{self.place}.{name}", what, SUPPORTED)

    def get(self, name: str, kind: type[_T], default: _T) -> _T:
        """Returns a field, typed. Raises `UnsupportedField` when it is of another type."""
        self._unread.discard(name)
        if name not in self._values:
            return default
        try:
            return msgspec.convert(self._values[name], kind)
        except msgspec.ValidationError as error:
            raise self.refused(name, str(error)) from error

    def part(self, name: str) -> Fields | None:
        """Returns an object inside this one; None: there is none."""
        values = self.get(name, dict[str, object], {})
        return Fields(f"{self.place}.{name}", values) if values else None

    def expect(self, name: str, *allowed: object, default: object = None) -> None:
        """Raises `UnsupportedField` unless the field is absent or has one of these values."""
        self._unread.discard(name)
        value = self._values.get(name, default)
        if value is not default and value not in allowed:
            raise self.refused(name, repr(value))

    def choice(self, name: str, default: _T, *others: _T) -> _T:
        """Returns a field that has one of a few values. Raises `UnsupportedField`."""
        self.expect(name, default, *others)
        return next((value for value in others if value == self._values.get(name)), default)

    def names(self, name: str) -> tuple[str, ...]:
        """Returns a list of patterns, as `Quantization` has them; none where absent. Some methods
        write them with wildcards."""
        listed = self.get(name, list[str], [])
        patterns = tuple(_without_wildcards(pattern) for pattern in listed)
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise self.refused(name, f"{pattern!r} ({error})") from error
        return patterns

    def ignore(self, *names: str) -> None:
        """Marks fields that say nothing we need as read."""
        self._unread.difference_update(names)

    def finish(self) -> None:
        """Raises `UnsupportedField` for a field that nobody has read."""
        for name in sorted(self._unread):
            raise self.refused(name, repr(self._values[name]))


def _without_wildcards(pattern: str) -> str:
    if "*" not in pattern or pattern.startswith("re:"):
        return pattern
    return rf"re:(.*\.)?{fnmatch.translate(pattern).removesuffix(_END)}(\..*)?$"


_END = r"\Z" if fnmatch.translate("").endswith(r"\Z") else r"\z"
"""How this release of Python ends a translated pattern."""
