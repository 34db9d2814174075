"""Values as hypothesis draws them from the chart's own schema."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.helm.helm_engine import CHART

TEXT = st.sampled_from(
    ["", "x", "a-b", "true", "123", "1e3", "null", "yes", "x: y", "# z", "'", '"']
)
"""Texts that people write, and what YAML would take for something else."""
NAME = st.sampled_from(["a", "a-b.c", "true", "123", "null"])
RAW = "kubernetes."
"""How names of Kubernetes' own types begin, which are passed through: not ours to draw."""


@cache
def schema() -> dict[str, Any]:
    return dict(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")))


def referred(reference: str) -> dict[str, Any]:
    """Returns the part of the schema that `#/a/b` stands for."""
    found: dict[str, Any] = schema()
    for key in reference.removeprefix("#/").split("/"):
        found = found[key]
    return found


def values() -> SearchStrategy[dict[str, Any]]:
    """Draws values that are valid by the schema; the model always has a name."""
    named = st.sampled_from(["org/model", "model"])
    return st.tuples(_of(schema(), ()), named).map(_with_model_name)


def _with_model_name(drawn: tuple[dict[str, Any], str]) -> dict[str, Any]:
    found, name = drawn
    return {**found, "model": {**found.get("model", {}), "name": name}}


def _of(node: dict[str, Any], path: tuple[str, ...]) -> SearchStrategy[Any]:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name.startswith(RAW):
            return st.just({})
        if name == "arguments":
            return st.sampled_from([[], ["--log-level=debug"]])  # services know settings by name
        return st.just([]) if name == "objects" else _of(referred(node["$ref"]), path)
    if "anyOf" in node:
        variants = [variant for variant in node["anyOf"] if variant.get("type") != "null"]
        return st.one_of([_of(variant, path) for variant in variants])
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from([word for word in node["enum"] if word is not None])
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    return {
        "object": _object,
        "array": _array,
        "string": _string,
        "integer": _integer,
        "number": _number,
        "boolean": lambda node, path: st.booleans(),
    }[kinds[0]](node, path)


def _object(node: dict[str, Any], path: tuple[str, ...]) -> SearchStrategy[Any]:
    properties = node.get("properties")
    if properties is None:
        extra = node.get("additionalProperties")
        if not isinstance(extra, dict) or "tolerations" in path:
            return st.just({})
        least = node.get("minProperties", 0)
        keys = st.sampled_from(["a/b", "c"])
        return st.dictionaries(keys, _of(extra, path), min_size=least, max_size=1)
    drawn = {key: _of(child, (*path, key)) for key, child in properties.items()}
    needed = set(node.get("required", ()))
    return st.sets(st.sampled_from(sorted(drawn)), max_size=3).flatmap(
        lambda keys: st.fixed_dictionaries({key: drawn[key] for key in sorted(keys | needed)})
    )


def _array(node: dict[str, Any], path: tuple[str, ...]) -> SearchStrategy[Any]:
    kind = node["items"].get("$ref", "").rpartition("/")[2]
    if kind.startswith(RAW) or kind == "container":
        return st.just([])
    return st.lists(_of(node["items"], path), min_size=node.get("minItems", 0), max_size=2)


def _string(node: dict[str, Any], path: tuple[str, ...]) -> SearchStrategy[Any]:
    pattern = node.get("pattern")
    if pattern is None:
        return TEXT.filter(lambda text: len(text) >= node.get("minLength", 0))
    most = node.get("maxLength", 1000)
    drawn = st.from_regex(f"(?a:{pattern})", fullmatch=True)
    return drawn.filter(lambda text: "\n" not in text and len(text) <= most)


def _integer(node: dict[str, Any], path: tuple[str, ...]) -> SearchStrategy[Any]:
    low = node.get("minimum", node.get("exclusiveMinimum", -1) + 1)
    return st.integers(low, node.get("maximum", low + 5000))


def _number(node: dict[str, Any], path: tuple[str, ...]) -> SearchStrategy[Any]:
    low = node.get("minimum", node.get("exclusiveMinimum", 0) + 0.125)
    high = node.get("maximum", node.get("exclusiveMaximum", 1000.125) - 0.125)
    return st.floats(low, high, width=16)


def paths(found: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Places of objects that the chart owns, in drawn values."""
    if not isinstance(found, dict):
        return []
    below = [p for key, child in found.items() for p in paths(child, (*path, key))]
    return [path, *below]
