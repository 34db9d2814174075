"""Writes of clients: which part of the object they may change, and what is refused.

- status is written only through its subresource, the rest only without it
- some fields never change (`_IMMUTABLE`)
- fields that readers count on have their defaults (`_set_defaults`)
- `managedFields` is kept up to date (`field_ownership`)
"""

from __future__ import annotations

import base64
from typing import Any

from tests.kubernetes_stand_in import field_ownership, scale
from tests.kubernetes_stand_in.api_errors import Invalid, NotFound, UnsupportedMediaType
from tests.kubernetes_stand_in.object_store import ObjectStore, copy_of
from tests.kubernetes_stand_in.patches import json_patch, merge_patch, strategic_merge
from tests.kubernetes_stand_in.resources import Object, Target

_IMMUTABLE: dict[str, tuple[str, ...]] = {
    "Deployment": ("selector",),
    "ReplicaSet": ("selector",),
    "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy"),
    "Job": ("selector", "template", "completionMode"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName", "volumeName"),
    "Pod": ("containers", "volumes", "serviceAccountName", "restartPolicy"),
}
_WITH_TEMPLATE = ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet")


class Writer:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(self, target: Target, body: Object, manager: str, *, dry_run: bool) -> Object:
        obj = self._complete(target, body)
        obj.pop("status", None)
        field_ownership.record_write(None, obj, manager)
        return self._store_new(obj, dry_run=dry_run)

    def replace(self, target: Target, body: Object, manager: str, *, dry_run: bool) -> Object:
        before = self._current(target)
        wanted = self._complete(target, body) if target.subresource != "scale" else body
        return self._save(target, before, wanted, manager, dry_run=dry_run)

    def patch(
        self, target: Target, patch_type: str, body: Any, manager: str, *, dry_run: bool
    ) -> Object:
        before = self._current(target)
        seen = scale.read(before) if target.subresource == "scale" else before
        if patch_type == "json":
            wanted = json_patch(seen, body)
        elif patch_type == "merge":
            wanted = merge_patch(seen, body)
        elif target.resource.is_builtin:
            wanted = strategic_merge(seen, body)
        else:
            raise UnsupportedMediaType(
                f"strategic merge patches do not work for {target.resource.kind}"
            )
        return self._save(target, before, wanted, manager, dry_run=dry_run)

    def apply(
        self, target: Target, body: Object, manager: str, *, force: bool, dry_run: bool
    ) -> tuple[Object, bool]:
        """Returns the object, and whether it is new. Raises `Conflict`."""
        wanted = self._complete(target, body)
        try:
            before = self._current(target)
        except NotFound:
            obj = field_ownership.apply(None, wanted, manager, force=force)
            return self._store_new(obj, dry_run=dry_run), True
        obj = field_ownership.apply(before, wanted, manager, force=force)
        if _without_ownership(obj) == _without_ownership(before) and _owned(obj) == _owned(before):
            return before, False
        return self._store_changed(target, before, obj, dry_run=dry_run), False

    # Inside ------------------------------------------------------------------------------------

    def _current(self, target: Target) -> Object:
        return self._store.get(target.resource, target.namespace, target.name)

    def _complete(self, target: Target, body: Object) -> Object:
        """Completes `body` with what its URL says; raises `Invalid` where they differ."""
        obj = copy_of(body)
        resource = target.resource
        meta = obj.setdefault("metadata", {})
        if obj.get("kind", resource.kind) != resource.kind:
            raise Invalid(resource.kind, target.name, f"its kind is {obj['kind']}")
        obj["apiVersion"], obj["kind"] = resource.api_version, resource.kind
        if target.name:
            meta.setdefault("name", target.name)
        if resource.namespaced and meta.setdefault("namespace", target.namespace) != (
            target.namespace
        ):
            raise Invalid(resource.kind, meta.get("name", ""), "namespace differs from the URL")
        if resource.kind == "Secret":
            _encode_string_data(obj)
        return obj

    def _save(
        self, target: Target, before: Object, wanted: Object, manager: str, *, dry_run: bool
    ) -> Object:
        obj = copy_of(before)
        if target.subresource == "scale":
            scale.write(obj, wanted)
        elif target.subresource == "status":
            obj["status"] = wanted.get("status", {})
        else:
            obj = {k: v for k, v in wanted.items() if k != "status"}
            if "status" in before:
                obj["status"] = before["status"]
        if target.subresource != "status":
            obj["metadata"].pop("managedFields", None)
            if _without_ownership(obj) == _without_ownership(before):
                return before
            field_ownership.record_write(before, obj, manager)
        saved = self._store_changed(target, before, obj, dry_run=dry_run)
        return scale.read(saved) if target.subresource == "scale" else saved

    def _store_new(self, obj: Object, *, dry_run: bool) -> Object:
        _set_defaults(obj)
        _check(obj)
        return obj if dry_run else self._store.create(obj)

    def _store_changed(
        self, target: Target, before: Object, obj: Object, *, dry_run: bool
    ) -> Object:
        _set_defaults(obj)
        _check(obj)
        if target.subresource != "status":
            _check_immutable(before, obj)
        return obj if dry_run else self._store.update(obj)


def _without_ownership(obj: Object) -> Object:
    meta = {k: v for k, v in obj["metadata"].items() if k != "managedFields"}
    return {**obj, "metadata": meta}


def _owned(obj: Object) -> list[Any]:
    entries = obj["metadata"].get("managedFields", ())
    return [{k: v for k, v in entry.items() if k != "time"} for entry in entries]


def _encode_string_data(secret: Object) -> None:
    for name, text in (secret.pop("stringData", None) or {}).items():
        secret.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()


def _set_defaults(obj: Object) -> None:
    if obj["kind"] in ("Deployment", "StatefulSet", "ReplicaSet"):
        obj["spec"].setdefault("replicas", 1)


def _check(obj: Object) -> None:
    """Refuses what would make the rest of the stand-in stumble; schemas are checked elsewhere."""
    if obj["kind"] not in _WITH_TEMPLATE:
        return
    name, spec = obj["metadata"]["name"], obj["spec"]
    labels = spec["template"]["metadata"].get("labels", {})
    wanted = spec["selector"].get("matchLabels", {})
    if any(labels.get(k) != v for k, v in wanted.items()):
        raise Invalid(obj["kind"], name, "`selector` does not match template `labels`")


def _check_immutable(before: Object, obj: Object) -> None:
    kind = obj["kind"]
    for field in _IMMUTABLE.get(kind, ()):
        if before["spec"].get(field) != obj["spec"].get(field):
            raise Invalid(kind, obj["metadata"]["name"], f"spec.{field}: field is immutable")
    if before.get("immutable") and before.get("data") != obj.get("data"):
        raise Invalid(kind, obj["metadata"]["name"], "data: field is immutable")
