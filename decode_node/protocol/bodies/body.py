"""The base of all request bodies: strict types, lax about numbers and names.

- "5" is no number, but 3.0 is an integer where one is expected: JSON knows only numbers.
- Unknown names are kept aside: the reader of a body says what becomes of them
  (`StrictBody.unknown_fields`). Names that peers know and that would change the answer are refused
  (`decode_node.protocol.bodies.not_built`).
- The docstring below a field is its description in docs/api.md and in the OpenAPI document.
- `Ignored` is the type of fields that are accepted and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_STRING = 512
"""Limit of characters of fields that are names."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Name = Annotated[str, Field(max_length=MAX_STRING)]
Int = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64), BeforeValidator(_whole)]
"""Integers that messages between processes can carry; tighter limits follow where a field is
used."""
Count = Annotated[int, BeforeValidator(_whole)]
"""Integers of any size: errors name the operator's limit, and no other."""
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31), BeforeValidator(_whole)]
IS_IGNORED = "ignored"
Ignored = Annotated[Any, IS_IGNORED]
"""The type of fields that the API has and that change nothing here."""


class StrictBody(BaseModel):
    """An object of a request, or a part of one."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)
    form_advice: ClassVar[str] = ""
    """Says, in errors, where this API has the form of the answer."""

    @classmethod
    def check_meant(cls, content: dict[str, Any]) -> None:
        """Raises `BadRequest` for fields that stand for others, which are missing for that."""

    def unknown_fields(self) -> list[str]:
        """Returns the names that no field has, here and in parts, like `stream_options.typo`."""
        return list(_unknown(self))


def _unknown(body: BaseModel) -> Iterator[str]:
    """Yields the names of `body` and its parts. Only a `StrictBody` wants to know all its names."""
    if isinstance(body, StrictBody):
        yield from body.model_extra or ()
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, list) and value and isinstance(value[0], int):
            continue  # Token ids, thousands of them.
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, BaseModel):
                yield from (f"{name}.{inner}" for inner in _unknown(part))
