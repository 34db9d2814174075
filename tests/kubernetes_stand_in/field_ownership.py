"""Server-side apply: who owns which field, and what follows from it.

`metadata.managedFields` says for each manager which fields it has set. An apply

    1. conflicts with fields that another manager has set to another value, unless forced
    2. writes what it names
    3. removes what this manager applied earlier and names no longer, if nobody else owns it

A plain write (create, update, patch) takes over the fields whose value it changes.

Fields are paths: names of maps' fields, and for lists that are merged by a key a `Key` with it.
Other lists are one value. The structure is FieldsV1 of k8s.io/apimachinery.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from tests.kubernetes_stand_in.api_errors import Conflict
from tests.kubernetes_stand_in.object_store import copy_of, now
from tests.kubernetes_stand_in.patches import merge_key
from tests.kubernetes_stand_in.resources import Object, resource_of_object

Step = str | tuple[tuple[str, Any], ...]
Path = tuple[Step, ...]

_EVERYBODYS = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}
_SERVERS = {
    ("metadata", name)
    for name in (
        "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields",
        "deletionTimestamp", "deletionGracePeriodSeconds",
    )
}  # fmt: skip
_MISSING = object()


def leaves(obj: Object) -> dict[Path, Any]:
    """Yields every field that somebody can own, with its value."""
    skipped = _EVERYBODYS | _SERVERS
    return {p: v for p, v in _walk((), obj) if p[:2] not in skipped and p[:1] not in skipped}


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _walk((*path, name), child)
    elif isinstance(value, list) and (key := _list_key(path, value)):
        for item in value:
            yield from _walk((*path, _key_of(key, item)), item)
    else:
        yield path, value


def _list_key(path: Path, items: list[Any]) -> tuple[str, ...] | None:
    if not items or not isinstance(path[-1], str):
        return None
    key = merge_key(path[-1], items)
    if path[-1] == "ports" and key and all("protocol" in item for item in items):
        return (*key, "protocol")
    return key


def _key_of(key: tuple[str, ...], item: dict[str, Any]) -> Step:
    return tuple((name, item.get(name)) for name in key)


def apply(live: Object | None, wanted: Object, manager: str, *, force: bool) -> Object:
    """Returns the object after `manager` applied `wanted`. Raises `Conflict`."""
    owners = _owners(live) if live else {}
    fields = leaves(wanted)
    current = leaves(live) if live else {}
    _check_conflicts(live, fields, current, owners, manager, force=force)
    me = (manager, "Apply")
    others = {name: paths - fields.keys() if force else paths for name, paths in owners.items()}
    mine = others.pop(me, set())
    result = copy_of(live) if live else {}
    for path in sorted(mine - fields.keys(), key=_is_key):
        if not any(path in paths for paths in others.values()):
            _remove(result, path)
    result = dict(_merge((), result, wanted))
    others[me] = set(fields)
    _write_owners(result, others)
    return result


def record_write(before: Object | None, after: Object, manager: str) -> None:
    """Gives `manager` the fields that differ between `before` and `after`, in `after`."""
    old, new = leaves(before) if before else {}, leaves(after)
    changed = {path for path, value in new.items() if old.get(path, _MISSING) != value}
    owners = {
        name: (paths - changed) & new.keys()
        for name, paths in (_owners(before) if before else {}).items()
    }
    me = (manager, "Update")
    owners[me] = owners.get(me, set()) | changed
    _write_owners(after, owners)


def _check_conflicts(
    live: Object | None,
    fields: dict[Path, Any],
    current: dict[Path, Any],
    owners: dict[tuple[str, str], set[Path]],
    manager: str,
    *,
    force: bool,
) -> None:
    if live is None or force:
        return
    for (name, operation), paths in owners.items():
        if (name, operation) == (manager, "Apply"):
            continue
        for path in sorted(paths & fields.keys(), key=str):
            if current.get(path, _MISSING) != fields[path]:
                raise Conflict(
                    resource_of_object(live),
                    live["metadata"]["name"],
                    f'Apply failed with 1 conflict: conflict with "{name}": {_dotted(path)}',
                )


def _merge(path: Path, live: Any, wanted: Any) -> Any:
    if isinstance(wanted, dict) and isinstance(live, dict):
        result = dict(live)
        for name, value in wanted.items():
            result[name] = _merge((*path, name), live.get(name), value)
        return result
    if isinstance(wanted, list) and isinstance(live, list) and (key := _list_key(path, wanted)):
        known = {_key_of(key, item): item for item in live}
        merged = dict(known)
        for item in wanted:
            name = _key_of(key, item)
            merged[name] = _merge((*path, name), known.get(name), item)
        first = [_key_of(key, item) for item in wanted]
        return [merged[n] for n in (*first, *(n for n in merged if n not in first))]
    return copy.deepcopy(wanted)


def _remove(value: Any, path: Path) -> bool:
    """Removes the field, and what becomes empty by it; whether nothing is left of `value`."""
    step, rest = path[0], path[1:]
    if isinstance(step, tuple):
        items = value if isinstance(value, list) else []
        item = next((i for i in items if all(i.get(k) == v for k, v in step)), None)
        if item is not None and (not rest or _remove(item, rest)):
            value.remove(item)
    elif isinstance(value, dict) and step in value and (not rest or _remove(value[step], rest)):
        del value[step]
    return not value


def _is_key(path: Path) -> bool:
    """Returns whether it is the key of a list's item: without it, its other fields would no longer
    be found.
    """
    return len(path) > 1 and isinstance(path[-2], tuple) and path[-1] in dict(path[-2])


# metadata.managedFields ------------------------------------------------------------------------


def _owners(obj: Object) -> dict[tuple[str, str], set[Path]]:
    return {
        (entry["manager"], entry["operation"]): set(_decode((), entry.get("fieldsV1", {})))
        for entry in obj["metadata"].get("managedFields", ())
    }


def _write_owners(obj: Object, owners: dict[tuple[str, str], set[Path]]) -> None:
    obj["metadata"]["managedFields"] = [
        {
            "manager": manager,
            "operation": operation,
            "apiVersion": obj["apiVersion"],
            "time": now(),
            "fieldsType": "FieldsV1",
            "fieldsV1": _encode(paths),
        }
        for (manager, operation), paths in owners.items()
        if paths
    ]


def _encode(paths: set[Path]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path in sorted(paths, key=str):
        node = root
        for step in path:
            name = f"f:{step}" if isinstance(step, str) else f"k:{json.dumps(dict(step))}"
            node = node.setdefault(name, {})
    return root


def _decode(path: Path, node: dict[str, Any]) -> Iterator[Path]:
    if not node and path:
        yield path
    for name, child in node.items():
        if name == ".":
            continue
        text = name[2:]
        step: Step = text if name.startswith("f:") else tuple(json.loads(text).items())
        yield from _decode((*path, step), child)


def _dotted(path: Path) -> str:
    text = ""
    for step in path:
        if isinstance(step, str):
            text += f".{step}"
        else:
            text += "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in step) + "]"
    return text
