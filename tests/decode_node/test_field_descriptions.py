"""Every field that a request may have says what it does: docs/api.md is made of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict

import pytest
from pydantic import BaseModel

import decode_node.protocol
from decode_node.protocol.bodies.body import IS_IGNORED
from decode_node.protocol.bodies.generation_body import GenerationBody

MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(decode_node.protocol.__path__, "decode_node.protocol.")
]
BODIES = {
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, BaseModel) and value is not BaseModel
}


def test_the_bodies_are_found() -> None:
    assert GenerationBody in BODIES and len(BODIES) > 10


@pytest.mark.parametrize("body", sorted(BODIES, key=lambda body: body.__name__))
def test_fields_have_a_docstring_below_them(body: type[BaseModel]) -> None:
    silent = [name for name, field in body.model_fields.items() if not field.description]
    assert not silent, f"write a docstring below {silent}"


def test_what_several_bodies_ignore_is_written_once() -> None:
    """The same words of the same name are one field, in `ignored_fields`."""
    writers: defaultdict[tuple[str, str | None], list[str]] = defaultdict(list)
    for body in BODIES:
        for name in vars(body).get("__annotations__", {}):
            field = body.model_fields.get(name)
            if field is not None and IS_IGNORED in field.metadata:
                writers[name, field.description].append(body.__name__)
    assert len(writers) > 30
    assert not {name: bodies for name, bodies in writers.items() if len(bodies) > 1}
