"""Questions that several parts ask about a pod."""

from __future__ import annotations

from tests.kubernetes_stand_in.resources import Object


def is_terminating(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def is_over(pod: Object) -> bool:
    return phase(pod) in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def controller_uid(obj: Object) -> str | None:
    owners = obj["metadata"].get("ownerReferences", ())
    return next((o["uid"] for o in owners if o.get("controller")), None)


def owner_reference(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
