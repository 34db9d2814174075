"""Reads the one kind of object that Helm 4 sends as protobuf: the Secret of a release.

The field numbers are those of `generated.proto` in k8s.io/api/core/v1 and k8s.io/apimachinery. An
answer may always be JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from tests.kubernetes_stand_in.api_errors import UnsupportedMediaType
from tests.kubernetes_stand_in.resources import Object

_MAGIC = b"k8s\x00"
_META_TEXTS = {
    1: "name", 2: "generateName", 3: "namespace", 5: "uid", 6: "resourceVersion",
}  # fmt: skip
_META_MAPS = {11: "labels", 12: "annotations"}


def decode_protobuf(raw: bytes) -> Object | None:
    """Decodes an object, or returns None for options of a request. Raises `UnsupportedMediaType`
    for any other object.
    """
    if not raw.startswith(_MAGIC):
        raise UnsupportedMediaType("not a Kubernetes protobuf message")
    envelope = dict(_fields(raw[len(_MAGIC) :]))
    types = dict(_fields(envelope[1]))
    kind = types[2].decode()
    if kind.endswith("Options"):
        return None
    if kind != "Secret":
        raise UnsupportedMediaType(f"send {kind} as JSON")
    return _secret(envelope[2])


def _secret(raw: bytes) -> Object:
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {}}
    for number, value in _fields(raw):
        if number == 1:
            secret["metadata"] = _metadata(value)
        elif number == 2:
            name, content = _pair(value)
            secret["data"][name] = base64.b64encode(content).decode()
        elif number == 3:
            secret["type"] = value.decode()
        elif number == 5:
            secret["immutable"] = bool(value)
    return secret


def _metadata(raw: bytes) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for number, value in _fields(raw):
        if number in _META_TEXTS and value:
            meta[_META_TEXTS[number]] = value.decode()
        elif number in _META_MAPS:
            name, text = _pair(value)
            meta.setdefault(_META_MAPS[number], {})[name] = text.decode()
    return meta


def _pair(raw: bytes) -> tuple[str, bytes]:
    entry = dict(_fields(raw))
    return entry[1].decode(), entry.get(2, b"")


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yields field number and value: bytes, or int for varints."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        if tag & 7 == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            size, at = _varint(raw, at)
            yield tag >> 3, raw[at : at + size]
            at += size
        else:
            raise UnsupportedMediaType(f"wire type {tag & 7}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
