"""LeaderWorkerSet: groups of pods that live and die together (kubernetes-sigs/lws, v0.10).

    name-0            leader of group 0     label worker-index 0
    name-0-1, -2, …   its workers           every container knows LWS_LEADER_ADDRESS

1. a group is complete when all its pods are there; workers are made with their leader
2. a pod that is lost, ends or restarts takes its group along (RecreateGroupOnPodRestart): the group
   begins anew when its last pod is gone
3. a new template replaces groups from the last to the first, `maxUnavailable` at a time
Each group has a Service of its own name (UniquePerReplica), by which workers find their leader
before it is ready.
"""

from __future__ import annotations

from typing import Any

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_over, is_ready, is_terminating, owner_reference
from tests.kubernetes_stand_in.pod_template import make_pod, pods_of, set_status, template_hash
from tests.kubernetes_stand_in.resources import Object

_PREFIX = "leaderworkerset.sigs.k8s.io"
_GROUP, _WORKER = f"{_PREFIX}/group-index", f"{_PREFIX}/worker-index"
_SET, _REVISION = f"{_PREFIX}/name", f"{_PREFIX}/template-revision-hash"


def reconcile_leader_worker_sets(store: ObjectStore) -> None:
    for lws in store.list_kind("LeaderWorkerSet"):
        if not is_terminating(lws):
            _reconcile(store, lws)


def _reconcile(store: ObjectStore, lws: Object) -> None:
    wanted = lws["spec"].get("replicas", 1)
    size = lws["spec"]["leaderWorkerTemplate"].get("size", 1)
    revision = template_hash(lws["spec"]["leaderWorkerTemplate"])
    groups: dict[int, list[Object]] = {index: [] for index in range(wanted)}
    for pod in pods_of(store, lws):
        groups.setdefault(int(pod["metadata"]["labels"][_GROUP]), []).append(pod)
    for index, pods in groups.items():
        if index >= wanted or _is_broken(pods, size):
            _delete(store, pods)
        elif not pods:
            _create(store, lws, index, size, revision)
    _roll(store, lws, groups, revision)
    _write_status(store, lws, groups, size, revision)


def _is_broken(pods: list[Object], size: int) -> bool:
    """Returns whether one of its pods is lost or not what it was."""
    if not pods:
        return False
    return len(pods) < size or any(
        is_terminating(pod) or is_over(pod) or _restarts(pod) for pod in pods
    )


def _restarts(pod: Object) -> int:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return sum(int(status.get("restartCount", 0)) for status in statuses)


def _delete(store: ObjectStore, pods: list[Object]) -> None:
    for pod in pods:
        if not is_terminating(pod):
            store.delete_object(pod)


def _create(store: ObjectStore, lws: Object, index: int, size: int, revision: str) -> None:
    meta, template = lws["metadata"], lws["spec"]["leaderWorkerTemplate"]
    group = f"{meta['name']}-{index}"
    if store.find("Service", meta["namespace"], group) is None:
        store.create(_service(lws, group, index))
    for worker in range(size):
        is_leader = worker == 0 and "leaderTemplate" in template
        name = group if worker == 0 else f"{group}-{worker}"
        pod = make_pod(lws, template["leaderTemplate" if is_leader else "workerTemplate"], name)
        labels = {_SET: meta["name"], _GROUP: str(index), _WORKER: str(worker)}
        pod["metadata"].setdefault("labels", {}).update({**labels, _REVISION: revision})
        pod["spec"] |= {"hostname": name, "subdomain": group}
        env = [
            {"name": "LWS_LEADER_ADDRESS", "value": f"{group}.{group}.{meta['namespace']}"},
            {"name": "LWS_GROUP_SIZE", "value": str(size)},
            {"name": "LWS_WORKER_INDEX", "value": str(worker)},
        ]
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            container["env"] = [*env, *container.get("env", ())]
        store.create(pod)


def _service(lws: Object, name: str, index: int) -> Object:
    selector = {_SET: lws["metadata"]["name"], _GROUP: str(index)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": lws["metadata"]["namespace"],
            "ownerReferences": [owner_reference(lws)],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [],
        },
    }


def _roll(store: ObjectStore, lws: Object, groups: dict[int, list[Object]], revision: str) -> None:
    """Replaces groups of older templates while few enough are unavailable."""
    size = lws["spec"]["leaderWorkerTemplate"].get("size", 1)
    rules = lws["spec"].get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {})
    allowed = int(rules.get("maxUnavailable", 1))
    wanted = range(lws["spec"].get("replicas", 1))
    down = sum(not _is_available(groups[index], size) for index in wanted)
    old = [i for i in wanted if groups[i] and not _has(groups[i], revision)]
    for index in reversed(old):
        if _is_available(groups[index], size):
            if down >= allowed:
                return
            down += 1
        _delete(store, groups[index])


def _is_available(pods: list[Object], size: int) -> bool:
    return len(pods) == size and all(is_ready(pod) and not is_terminating(pod) for pod in pods)


def _has(pods: list[Object], revision: str) -> bool:
    return all(pod["metadata"]["labels"][_REVISION] == revision for pod in pods)


def _write_status(
    store: ObjectStore, lws: Object, groups: dict[int, list[Object]], size: int, revision: str
) -> None:
    available = [pods for pods in groups.values() if _is_available(pods, size)]
    status: dict[str, Any] = {
        "observedGeneration": lws["metadata"]["generation"],
        "replicas": sum(map(bool, groups.values())),
        "readyReplicas": len(available),
        "updatedReplicas": sum(_has(pods, revision) for pods in available),
        "hpaPodSelector": f"{_SET}={lws['metadata']['name']},{_WORKER}=0",
    }
    set_status(store, lws, status)
