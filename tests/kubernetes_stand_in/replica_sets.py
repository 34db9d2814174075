"""ReplicaSet: as many pods as it says; which ones go first when there are too many."""

from __future__ import annotations

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_ready, is_terminating, phase
from tests.kubernetes_stand_in.pod_template import is_active, make_pod, pods_of, set_status
from tests.kubernetes_stand_in.resources import Object

_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


def reconcile_replica_sets(store: ObjectStore) -> None:
    for replica_set in store.list_kind("ReplicaSet"):
        if not is_terminating(replica_set):
            _reconcile(store, replica_set)


def _reconcile(store: ObjectStore, replica_set: Object) -> None:
    wanted = replica_set["spec"].get("replicas", 1)
    active = [pod for pod in pods_of(store, replica_set) if is_active(pod)]
    for _ in range(wanted - len(active)):
        store.create(make_pod(replica_set, replica_set["spec"]["template"]))
    for pod in sorted(active, key=_rank)[: max(0, len(active) - wanted)]:
        store.delete_object(pod)
    active = [pod for pod in pods_of(store, replica_set) if is_active(pod)]
    ready = sum(map(is_ready, active))
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": len(active),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "observedGeneration": replica_set["metadata"]["generation"],
    }
    set_status(store, replica_set, status)


def _rank(pod: Object) -> tuple[object, ...]:
    """Ranks pods; the smaller, the sooner it goes: not placed, not running, not ready, cheap,
    young.
    """
    cost = int(pod["metadata"].get("annotations", {}).get(_DELETION_COST, 0))
    age = -int(pod["metadata"]["resourceVersion"])
    return (bool(pod["spec"].get("nodeName")), phase(pod) == "Running", is_ready(pod), cost, age)
