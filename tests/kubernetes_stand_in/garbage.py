"""Objects whose owner is gone go, too; and so does everything in a namespace that is deleted."""

from __future__ import annotations

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_terminating


def collect_garbage(store: ObjectStore) -> None:
    objects = store.all()
    uids = {obj["metadata"]["uid"] for obj in objects}
    for obj in objects:
        owners = obj["metadata"].get("ownerReferences", ())
        if owners and not is_terminating(obj) and not any(o["uid"] in uids for o in owners):
            store.delete_object(obj)


def empty_namespaces(store: ObjectStore) -> None:
    namespaces = {obj["metadata"]["name"] for obj in store.list_kind("Namespace")}
    for obj in store.all():
        namespace = obj["metadata"].get("namespace")
        if namespace and namespace not in namespaces and not is_terminating(obj):
            store.delete_object(obj)
