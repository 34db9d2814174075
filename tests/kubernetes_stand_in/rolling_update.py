"""Deployment: one ReplicaSet for each pod template it ever had, and pods moved between them.

    1. the newest template's ReplicaSet exists
    2. scale up     it grows while all together stay within replicas + maxSurge
    3. scale down   the old ones shrink while available pods stay at replicas - maxUnavailable;
                    pods that are not ready go first, they serve nobody
    4. complete     the new one has all replicas available, the old ones have none

The arithmetic is that of k8s.io/kubernetes/pkg/controller/deployment/rolling.go. Pods that are
terminating count nowhere, as there.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes_stand_in.disruption import share
from tests.kubernetes_stand_in.object_store import ObjectStore, now
from tests.kubernetes_stand_in.pod_state import controller_uid, is_terminating, owner_reference
from tests.kubernetes_stand_in.pod_template import set_status, template_hash
from tests.kubernetes_stand_in.resources import Object

_HASH = "pod-template-hash"
_REVISION = "deployment.kubernetes.io/revision"


def reconcile_deployments(store: ObjectStore) -> None:
    for deployment in store.list_kind("Deployment"):
        if not is_terminating(deployment):
            _reconcile(store, deployment)


def _reconcile(store: ObjectStore, deployment: Object) -> None:
    new = _new_replica_set(store, deployment)
    if new is None:
        _create_replica_set(store, deployment)
        return
    old = [
        rs for rs in _owned(store, deployment) if rs["metadata"]["uid"] != new["metadata"]["uid"]
    ]
    old.sort(key=_revision)
    _set_revision(store, deployment, new, old)
    strategy = deployment["spec"].get("strategy", {})
    if strategy.get("type") == "Recreate":
        _recreate(store, deployment, new, old)
    elif not _scale_up(store, deployment, new, old):
        _scale_down(store, deployment, new, old)
    _write_status(store, deployment, new, old)


def _owned(store: ObjectStore, deployment: Object) -> list[Object]:
    uid = deployment["metadata"]["uid"]
    sets = store.list_kind("ReplicaSet", deployment["metadata"]["namespace"])
    return [rs for rs in sets if controller_uid(rs) == uid and not is_terminating(rs)]


def _new_replica_set(store: ObjectStore, deployment: Object) -> Object | None:
    name = template_hash(deployment["spec"]["template"])
    return next(
        (rs for rs in _owned(store, deployment) if rs["metadata"]["labels"][_HASH] == name), None
    )


def _create_replica_set(store: ObjectStore, deployment: Object) -> None:
    """Creates it with no pods yet: scaling is another step. Its template is the deployment's and
    the hash.
    """
    meta, spec = deployment["metadata"], deployment["spec"]
    hash_ = template_hash(spec["template"])
    template = copy.deepcopy(spec["template"])
    template["metadata"].setdefault("labels", {})[_HASH] = hash_
    store.create(
        {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"{meta['name']}-{hash_}",
                "namespace": meta["namespace"],
                "labels": copy.deepcopy(template["metadata"]["labels"]),
                "annotations": {},
                "ownerReferences": [owner_reference(deployment)],
            },
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {**spec["selector"]["matchLabels"], _HASH: hash_}},
                "template": template,
            },
        }
    )


def _revision(replica_set: Object) -> int:
    return int(replica_set["metadata"].get("annotations", {}).get(_REVISION, 0))


def _set_revision(store: ObjectStore, deployment: Object, new: Object, old: list[Object]) -> None:
    """Sets the revision; a template that comes back has the newest number again."""
    revision = max(_revision(new), 1 + max(map(_revision, old), default=0))
    for obj in (new, deployment):
        if obj["metadata"].get("annotations", {}).get(_REVISION) != str(revision):
            store.change(obj, lambda current: _annotate(current, revision))


def _annotate(obj: Object, revision: int) -> None:
    obj["metadata"].setdefault("annotations", {})[_REVISION] = str(revision)


def _bounds(deployment: Object) -> tuple[int, int]:
    """Returns the most pods that may be, and the fewest that must be available."""
    wanted = deployment["spec"].get("replicas", 1)
    rolling = deployment["spec"].get("strategy", {}).get("rollingUpdate") or {}
    surge = share(rolling.get("maxSurge", "25%"), wanted, round_up=True)
    unavailable = share(rolling.get("maxUnavailable", "25%"), wanted, round_up=False)
    if surge == unavailable == 0:
        unavailable = 1
    return wanted + surge, max(0, wanted - unavailable)


def _replicas(replica_set: Object) -> int:
    return int(replica_set["spec"].get("replicas", 1))


def _available(replica_set: Object) -> int:
    """Returns the pods available as of what its status was written for; a set that is about to
    shrink may say too much.
    """
    status = replica_set.get("status", {})
    return min(int(status.get("availableReplicas", 0)), _replicas(replica_set))


def _scale(store: ObjectStore, replica_set: Object, replicas: int) -> bool:
    if _replicas(replica_set) == replicas:
        return False

    def edit(current: Object) -> None:
        current["spec"]["replicas"] = replicas

    store.change(replica_set, edit)
    return True


def _scale_up(store: ObjectStore, deployment: Object, new: Object, old: list[Object]) -> bool:
    wanted = deployment["spec"].get("replicas", 1)
    if _replicas(new) > wanted:
        return _scale(store, new, wanted)
    limit, _ = _bounds(deployment)
    room = max(0, limit - sum(map(_replicas, (new, *old))))
    return _scale(store, new, min(wanted, _replicas(new) + room))


def _scale_down(store: ObjectStore, deployment: Object, new: Object, old: list[Object]) -> bool:
    total = sum(map(_replicas, (new, *old)))
    _, needed = _bounds(deployment)
    room = total - needed - (_replicas(new) - _available(new))
    if room <= 0:
        return False
    for replica_set in old:
        unhealthy = min(_replicas(replica_set) - _available(replica_set), room)
        if unhealthy > 0:
            return _scale(store, replica_set, _replicas(replica_set) - unhealthy)
    room = sum(map(_available, (new, *old))) - needed
    for replica_set in old:
        if _replicas(replica_set) and room > 0:
            fewer = min(_replicas(replica_set), room)
            return _scale(store, replica_set, _replicas(replica_set) - fewer)
    return False


def _recreate(store: ObjectStore, deployment: Object, new: Object, old: list[Object]) -> None:
    for replica_set in old:
        _scale(store, replica_set, 0)
    if not any(rs.get("status", {}).get("replicas") for rs in old):
        _scale(store, new, deployment["spec"].get("replicas", 1))


def _write_status(store: ObjectStore, deployment: Object, new: Object, old: list[Object]) -> None:
    wanted = deployment["spec"].get("replicas", 1)
    count = _sums((new, *old))
    updated = int(new.get("status", {}).get("replicas", 0))
    available = count["availableReplicas"]
    _, needed = _bounds(deployment)
    is_complete = updated == available == count["replicas"] == wanted and not any(
        map(_replicas, old)
    )
    status: dict[str, Any] = {
        **count,
        "updatedReplicas": updated,
        "unavailableReplicas": max(0, wanted - available),
        "observedGeneration": deployment["metadata"]["generation"],
    }
    before = deployment.get("status", {}).get("conditions", ())
    status["conditions"] = [
        _condition(before, "Available", available >= needed, "MinimumReplicas"),
        _condition(
            before,
            "Progressing",
            True,
            "NewReplicaSetAvailable" if is_complete else "ReplicaSetUpdated",
        ),
    ]
    set_status(store, deployment, status)


def _sums(sets: tuple[Object, ...]) -> dict[str, int]:
    names = ("replicas", "readyReplicas", "availableReplicas")
    return {name: sum(rs.get("status", {}).get(name, 0) for rs in sets) for name in names}


def _condition(before: Any, type_: str, value: bool, reason: str) -> dict[str, Any]:
    condition = {"type": type_, "status": "True" if value else "False", "reason": reason}
    same = next((c for c in before if condition.items() <= c.items()), None)
    return same or {**condition, "lastTransitionTime": now(), "lastUpdateTime": now()}
