"""JSON schemas that are public, with documents that they allow and documents that they forbid.

`public_schemas.json.xz` holds, unchanged, the tests of draft 2020-12 of the JSON-Schema-Test-Suite
(MIT) and schemas of SchemaStore with samples of its tests (Apache 2.0), each with its licence and
the place that it comes from.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("public_schemas.json.xz")


@dataclass(frozen=True, slots=True)
class PublicSchema:
    """A schema. `place` names it within its source; `valid` and `invalid` are documents."""

    place: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


@cache
def public_schemas() -> list[PublicSchema]:
    """Returns all of them."""
    sources = json.loads(lzma.decompress(_FILE.read_bytes()))
    return [PublicSchema(**group) for source in sources for group in source["groups"]]
