"""The three ways in which clients change part of an object.

- merge patch (RFC 7386): maps are merged, null deletes, lists are replaced
- JSON patch (RFC 6902): a list of operations
- strategic merge patch: as the merge patch, but lists whose items have a key are merged by it
  (`MERGE_KEYS`), and `$patch`, `$retainKeys`, `$setElementOrder/…`, `$deleteFromPrimitiveList/…`
  are instructions. Only for built-in kinds. The keys are those of `patchMergeKey` in k8s.io/api.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes_stand_in.api_errors import BadRequest
from tests.kubernetes_stand_in.resources import Object

MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    "resourceClaims": ("name",),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "secrets": ("name",),
}
_PRIMITIVE_SETS = ("finalizers",)
_MISSING = object()


def merge_key(field: str, items: list[Any]) -> tuple[str, ...] | None:
    """Returns the fields by which the items of a list are told apart; None if the list is one
    value.
    """
    if field == "ports" and items and all(isinstance(item, dict) for item in items):
        return ("containerPort",) if any("containerPort" in i for i in items) else ("port",)
    key = MERGE_KEYS.get(field)
    if key is None or not all(isinstance(i, dict) and all(k in i for k in key) for i in items):
        return None
    return key


def merge_patch(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def json_patch(target: Object, operations: list[dict[str, Any]]) -> Object:
    """Raises `BadRequest` for a path that is not there or a test that fails."""
    result = {"": copy.deepcopy(target)}
    for operation in operations:
        path = ["", *_pointer(operation["path"])]
        kind = operation["op"]
        if kind == "test":
            if _at(result, path) != operation["value"]:
                raise BadRequest(f"the test of {operation['path']} failed")
        elif kind == "remove":
            _take(result, path)
        elif kind in ("add", "replace"):
            _place(result, path, copy.deepcopy(operation["value"]), insert=kind == "add")
        elif kind in ("move", "copy"):
            source = ["", *_pointer(operation["from"])]
            value = _take(result, source) if kind == "move" else copy.deepcopy(_at(result, source))
            _place(result, path, value, insert=True)
        else:
            raise BadRequest(f"unknown operation {kind!r} in a JSON patch")
    return result[""]


def _pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _at(target: Any, path: list[str]) -> Any:
    for part in path:
        try:
            target = target[int(part)] if isinstance(target, list) else target[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise BadRequest(f"there is no {'/'.join(path)}") from None
    return target


def _take(target: Any, path: list[str]) -> Any:
    value = _at(target, path)
    parent = _at(target, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]
    return value


def _place(target: Any, path: list[str], value: Any, *, insert: bool) -> None:
    parent = _at(target, path[:-1])
    last = path[-1]
    if not isinstance(parent, list):
        parent[last] = value
    elif last == "-":
        parent.append(value)
    elif insert:
        parent.insert(int(last), value)
    else:
        parent[int(last)] = value


def strategic_merge(target: Any, patch: dict[str, Any]) -> dict[str, Any]:
    """Merges `patch` into `target`; neither is changed."""
    if patch.get("$patch") == "replace":
        return {k: copy.deepcopy(v) for k, v in patch.items() if k != "$patch"}
    result: dict[str, Any] = copy.deepcopy(target) if isinstance(target, dict) else {}
    if "$retainKeys" in patch:
        result = {k: v for k, v in result.items() if k in patch["$retainKeys"]}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            _drop_values(result, name.partition("/")[2], value)
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        order = patch.get(f"$setElementOrder/{name}", ())
        merged = _merge_field(name, result.get(name), value, order)
        if merged is _MISSING:
            result.pop(name, None)
        else:
            result[name] = merged
    for name, order in patch.items():
        field = name.removeprefix("$setElementOrder/")
        if field != name and isinstance(result.get(field), list):
            result[field] = _in_order(field, result[field], order)
    return result


def _merge_field(name: str, current: Any, value: Any, order: Any) -> Any:
    if value is None:
        return _MISSING
    if isinstance(value, dict):
        return _MISSING if value.get("$patch") == "delete" else strategic_merge(current, value)
    if isinstance(value, list):
        key = merge_key(name, [i for i in (*value, *order) if not _is_replacement(i)])
        if key is not None:
            return _merge_items(key, current or [], value)
        if name in _PRIMITIVE_SETS:
            return [*(current or []), *(v for v in value if v not in (current or []))]
    return copy.deepcopy(value)


def _is_replacement(item: Any) -> bool:
    return isinstance(item, dict) and item.get("$patch") == "replace"


def _merge_items(key: tuple[str, ...], current: list[Any], patch: list[Any]) -> list[Any]:
    if any(_is_replacement(item) for item in patch):
        return [copy.deepcopy(item) for item in patch if not _is_replacement(item)]
    result = copy.deepcopy(current)
    for item in patch:
        at = next(
            (i for i, r in enumerate(result) if _identity(key, r) == _identity(key, item)), -1
        )
        if item.get("$patch") == "delete":
            if at >= 0:
                del result[at]
        elif at >= 0:
            result[at] = strategic_merge(result[at], item)
        else:
            result.append(strategic_merge({}, item))
    return result


def _identity(key: tuple[str, ...], item: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(item.get(field) for field in key)


def _drop_values(result: dict[str, Any], field: str, values: list[Any]) -> None:
    if isinstance(result.get(field), list):
        result[field] = [v for v in result[field] if v not in values]


def _in_order(field: str, items: list[Any], order: list[Any]) -> list[Any]:
    """Puts `items` in the order of `order`; those that it does not name keep their place at the
    end.
    """
    key = merge_key(field, items)
    if key is None:
        wanted = {value: i for i, value in enumerate(order)}
        return sorted(items, key=lambda item: wanted.get(item, len(wanted)))
    ranks = {_identity(key, value): i for i, value in enumerate(order)}
    return sorted(items, key=lambda item: ranks.get(_identity(key, item), len(ranks)))
