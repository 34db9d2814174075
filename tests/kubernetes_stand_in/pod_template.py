"""Makes pods from templates."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import (
    controller_uid,
    is_over,
    is_terminating,
    owner_reference,
)
from tests.kubernetes_stand_in.resources import Object


def template_hash(template: dict[str, Any]) -> str:
    text = json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def make_pod(owner: Object, template: dict[str, Any], name: str = "") -> Object:
    """Makes a pod; an empty `name` is the owner's, with something random behind it."""
    meta = copy.deepcopy(template.get("metadata", {}))
    meta.pop("creationTimestamp", None)
    meta["namespace"] = owner["metadata"]["namespace"]
    meta["ownerReferences"] = [owner_reference(owner)]
    if name:
        meta["name"] = name
    else:
        meta["generateName"] = f"{owner['metadata']['name']}-"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": copy.deepcopy(template["spec"]),
        "status": {"phase": "Pending"},
    }


def pods_of(store: ObjectStore, owner: Object) -> list[Object]:
    """Returns all of them, in whatever state."""
    uid = owner["metadata"]["uid"]
    pods = store.list_kind("Pod", owner["metadata"]["namespace"])
    return [pod for pod in pods if controller_uid(pod) == uid]


def is_active(pod: Object) -> bool:
    return not is_terminating(pod) and not is_over(pod)


def set_status(store: ObjectStore, obj: Object, status: dict[str, Any]) -> None:
    if obj.get("status") != status:

        def edit(current: Object) -> None:
            current["status"] = status

        store.change(obj, edit)
