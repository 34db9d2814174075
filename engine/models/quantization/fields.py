"""The fields of a `quantization_config`, each read once; what nothing reads is refused by name."""

from __future__ import annotations

import fnmatch
import re
from typing import TypeVar

import msgspec

from engine.models.config.number_names import number_name
from engine.models.specs.base import UnsupportedField

SUPPORTED = (
    "use a checkpoint in FP8 (block, channel or tensor scales), INT8, AWQ, GPTQ, AutoRound or "
    "compressed-tensors with 4-bit groups, NVFP4, MXFP4, MXFP8, or without quantisation"
)

_T = TypeVar("_T")
_MEANINGS = {
    "act_bits": "activations of {} bits",
    "activation_scheme": "activations quantised by {}",
    "bits": "weights of {} bits",
    "checkpoint_format": "weights packed as {}",
    "data_type": "weights of type {}",
    "desc_act": "inputs in the order of their activations (desc_act {})",
    "expert_dtype": "experts' weights in {}",
    "fmt": "numbers in {}",
    "format": "weights stored as {}",
    "group_size": "groups of {}",
    "kv_cache_quant_algo": "a KV cache in {}",
    "kv_cache_scheme": "a KV cache in {}",
    "lm_head": "a quantised head (lm_head {})",
    "moe_sparsity_config": "experts of which layers have kept {}",
    "num_bits": "{} bits",
    "quant_algo": "weights quantised by {}",
    "quant_method": "weights quantised by {}",
    "scale_dtype": "scales in {}",
    "weight_block_size": "blocks of {}",
}
"""Fields that are not here are written as name and value."""
_SHOWN = 80
"""Characters of a value in a message."""


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

    def unsupported(self, name: str) -> UnsupportedField:
        """Returns the error of a field whose value is not here, with what it means."""
        value = repr(self._values.get(name))
        value = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        return self.refused(name, _MEANINGS.get(name, f"{name} = {{}}").format(value))

    def get(self, name: str, kind: type[_T], default: _T) -> _T:
        """Returns a field, typed. Raises `UnsupportedField` when it is of another type."""
        self._unread.discard(name)
        if name not in self._values:
            return default
        try:
            return msgspec.convert(self._values[name], kind)
        except msgspec.ValidationError as error:
            raise self.unsupported(name) from error

    def word(self, name: str, default: str = "") -> str:
        """Returns a field that is one of a few names, as `number_name` spells them."""
        return number_name(self.get(name, str, default))

    def has(self, name: str) -> bool:
        """Returns whether the field is there and not null."""
        return name in self._values

    def part(self, name: str) -> Fields | None:
        """Returns an object inside this one; None: there is none."""
        values = self.get(name, dict[str, object], {})
        return Fields(f"{self.place}.{name}", values) if values else None

    def steps(self, name: str) -> list[Fields]:
        """Returns the objects of a field that has one, a list of them, or none."""
        found = self.get(name, dict[str, object] | list[dict[str, object]], {})  # type: ignore[arg-type]
        listed = found if isinstance(found, list) else [found] if found else []
        return [Fields(f"{self.place}.{name}", values) for values in listed]

    def expect(self, name: str, *allowed: object, default: object = None) -> None:
        """Raises `UnsupportedField` unless the field is absent or has one of these values. Names of
        numbers may be spelled in any way."""
        self._unread.discard(name)
        value = self._values.get(name, default)
        if value is not default and _spelled(value) not in map(_spelled, allowed):
            raise self.unsupported(name)

    def choice(self, name: str, default: _T, *others: _T) -> _T:
        """Returns a field that has one of a few values. Raises `UnsupportedField`."""
        self.expect(name, default, *others)
        said = _spelled(self._values.get(name))
        return next((value for value in others if _spelled(value) == said), default)

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
        """Raises `UnsupportedField` for a field that nothing has read."""
        for name in sorted(self._unread):
            raise self.unsupported(name)


def _spelled(value: object) -> object:
    return number_name(value) if isinstance(value, str) else value


def _without_wildcards(pattern: str) -> str:
    if "*" not in pattern or pattern.startswith("re:"):
        return pattern
    return rf"re:(.*\.)?{fnmatch.translate(pattern).removesuffix(_END)}(\..*)?$"


_END = r"\Z" if fnmatch.translate("").endswith(r"\Z") else r"\z"
"""How this release of Python ends a translated pattern."""
