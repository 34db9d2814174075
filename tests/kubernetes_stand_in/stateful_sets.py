"""StatefulSet: pods with numbers, each with its own claims.

- OrderedReady: one after the other upwards; Parallel: all at once
- rolling update: from the highest number down to `partition`, one at a time, each when all are
  ready
"""

from __future__ import annotations

import copy

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_over, is_ready, is_terminating
from tests.kubernetes_stand_in.pod_template import make_pod, pods_of, set_status, template_hash
from tests.kubernetes_stand_in.resources import Object

_HASH = "controller-revision-hash"


def reconcile_stateful_sets(store: ObjectStore) -> None:
    for stateful_set in store.list_kind("StatefulSet"):
        if not is_terminating(stateful_set):
            _reconcile(store, stateful_set)


def _reconcile(store: ObjectStore, stateful_set: Object) -> None:
    wanted = stateful_set["spec"].get("replicas", 1)
    pods = {_ordinal(pod): pod for pod in pods_of(store, stateful_set)}
    for pod in pods.values():
        if is_over(pod):
            store.delete_object(pod)
    is_parallel = stateful_set["spec"].get("podManagementPolicy") == "Parallel"
    if not _fill(store, stateful_set, pods, wanted, is_parallel=is_parallel):
        surplus = sorted((i for i in pods if i >= wanted), reverse=True)
        for ordinal in surplus if is_parallel else surplus[:1]:
            _delete(store, pods[ordinal])
        if not surplus:
            _roll(store, stateful_set, pods)
    _write_status(store, stateful_set)


def _fill(
    store: ObjectStore, owner: Object, pods: dict[int, Object], wanted: int, *, is_parallel: bool
) -> bool:
    """Returns whether something is still missing or, in order, not ready."""
    is_waiting = False
    for ordinal in range(wanted):
        if ordinal not in pods:
            _create(store, owner, ordinal)
            is_waiting = True
        elif not is_ready(pods[ordinal]) or is_terminating(pods[ordinal]):
            is_waiting = True
        if is_waiting and not is_parallel:
            return True
    return is_waiting and not is_parallel


def _roll(store: ObjectStore, owner: Object, pods: dict[int, Object]) -> None:
    strategy = owner["spec"].get("updateStrategy", {})
    if strategy.get("type") == "OnDelete":
        return
    if any(is_terminating(pod) or not is_ready(pod) for pod in pods.values()):
        return
    partition = strategy.get("rollingUpdate", {}).get("partition", 0)
    wanted = template_hash(owner["spec"]["template"])
    for ordinal in sorted(pods, reverse=True):
        if ordinal >= partition and pods[ordinal]["metadata"]["labels"][_HASH] != wanted:
            _delete(store, pods[ordinal])
            return


def _create(store: ObjectStore, owner: Object, ordinal: int) -> None:
    name = f"{owner['metadata']['name']}-{ordinal}"
    pod = make_pod(owner, owner["spec"]["template"], name)
    labels = pod["metadata"].setdefault("labels", {})
    labels[_HASH] = template_hash(owner["spec"]["template"])
    labels["statefulset.kubernetes.io/pod-name"] = name
    labels["apps.kubernetes.io/pod-index"] = str(ordinal)
    pod["spec"]["hostname"] = name
    pod["spec"]["subdomain"] = owner["spec"].get("serviceName", "")
    for claim in owner["spec"].get("volumeClaimTemplates", ()):
        _claim(store, pod, claim)
    store.create(pod)


def _claim(store: ObjectStore, pod: Object, template: Object) -> None:
    claim = copy.deepcopy(template)
    claim |= {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    name = f"{template['metadata']['name']}-{pod['metadata']['name']}"
    namespace = pod["metadata"]["namespace"]
    claim["metadata"] |= {"name": name, "namespace": namespace}
    if store.find("PersistentVolumeClaim", namespace, name) is None:
        store.create(claim)
    volume = {
        "name": template["metadata"]["name"],
        "persistentVolumeClaim": {"claimName": name},
    }
    pod["spec"].setdefault("volumes", []).append(volume)


def _delete(store: ObjectStore, pod: Object) -> None:
    if not is_terminating(pod):
        store.delete_object(pod)


def _ordinal(pod: Object) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _write_status(store: ObjectStore, owner: Object) -> None:
    pods = [pod for pod in pods_of(store, owner) if not is_terminating(pod)]
    hash_ = template_hash(owner["spec"]["template"])
    updated = sum(pod["metadata"]["labels"][_HASH] == hash_ for pod in pods)
    ready = sum(map(is_ready, pods))
    revision = f"{owner['metadata']['name']}-{hash_}"
    is_rolled = updated == len(pods)
    status = {
        "replicas": len(pods),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "updatedReplicas": updated,
        "currentReplicas": updated,
        "updateRevision": revision,
        "currentRevision": revision
        if is_rolled
        else owner.get("status", {}).get("currentRevision", revision),
        "observedGeneration": owner["metadata"]["generation"],
    }
    set_status(store, owner, status)
