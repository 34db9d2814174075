"""Every field that a request may have says what it does: docs/api.md is made of it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from pydantic import BaseModel

import decode_node.protocol
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
