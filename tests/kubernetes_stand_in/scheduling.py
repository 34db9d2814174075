"""Puts pods on nodes that have the devices they ask for.

Only extended resources (`nvidia.com/gpu`) are counted: CPU and memory of a rendered chart say
nothing about the machine that runs the tests. A pod that fits nowhere stays Pending until another
one is gone, as on a full GPU cluster.
"""

from __future__ import annotations

from collections import Counter

from tests.kubernetes_stand_in.nodes import is_unknown
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_over, is_terminating
from tests.kubernetes_stand_in.resources import Object

_COMPONENT = "app.kubernetes.io/component"


def schedule_pods(store: ObjectStore) -> None:
    for pod in store.list_kind("Pod"):
        if not pod["spec"].get("nodeName") and not is_terminating(pod):
            _schedule(store, pod)


def _schedule(store: ObjectStore, pod: Object) -> None:
    wanted = _devices(pod)
    for node in _by_preference(store, pod):
        free = _free(store, node)
        if all(free[name] >= count for name, count in wanted.items()):
            name = node["metadata"]["name"]

            def bind(current: Object, name: str = name) -> None:
                current["spec"]["nodeName"] = name

            store.change(pod, bind)
            return


def _by_preference(store: ObjectStore, pod: Object) -> list[Object]:
    """Returns the nodes that answer: first those with the fewest pods of its component, as spread
    constraints have it, then those with the fewest at all."""
    component = pod["metadata"].get("labels", {}).get(_COMPONENT)

    def load(node: Object) -> tuple[int, int, str]:
        name = node["metadata"]["name"]
        there = [
            other
            for other in store.list_kind("Pod")
            if other["spec"].get("nodeName") == name
            and not is_over(other)
            and not is_terminating(other)
        ]
        alike = [o for o in there if o["metadata"].get("labels", {}).get(_COMPONENT) == component]
        return len(alike), len(there), name

    nodes = store.list_kind("Node")
    if len(nodes) == 1:
        return nodes
    return sorted((node for node in nodes if not is_unknown(node)), key=load)


def _free(store: ObjectStore, node: Object) -> Counter[str]:
    allocatable = node["status"]["allocatable"]
    free = Counter({name: int(count) for name, count in allocatable.items() if "/" in name})
    for pod in store.list_kind("Pod"):
        if pod["spec"].get("nodeName") == node["metadata"]["name"] and not is_over(pod):
            free.subtract(_devices(pod))
    return free


def _devices(pod: Object) -> Counter[str]:
    wanted: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        limits = container.get("resources", {}).get("limits", {})
        wanted.update({name: int(count) for name, count in limits.items() if "/" in name})
    return wanted
