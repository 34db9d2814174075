"""Nodes that fall silent, as node lifecycle controller and pod garbage collector treat them.

1. lost       its processes are gone; for 40 s nobody knows: its pods are listed as ready
2. unknown    no lease for so long: its pods are not ready, and no Service leads to them
3. evicted    after five minutes more: its pods are deleted, and others made elsewhere; the
              kubelet that would end them is silent, so they stay
4. removed    the Node is deleted, and with it what is left of its pods
A test says when each begins.
"""

from __future__ import annotations

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_ready, is_terminating
from tests.kubernetes_stand_in.resources import Object

UNREACHABLE = "node.kubernetes.io/unreachable"


def reconcile_nodes(store: ObjectStore) -> None:
    nodes = {node["metadata"]["name"]: node for node in store.list_kind("Node")}
    for pod in store.list_kind("Pod"):
        name = pod["spec"].get("nodeName")
        if name and name not in nodes:
            store.delete_object(pod, grace_s=0)
        elif name and is_unknown(nodes[name]):
            if is_ready(pod):
                store.change(pod, _set_not_ready)
            if is_tainted(nodes[name]) and not is_terminating(pod):
                store.delete_object(pod)


def is_unknown(node: Object) -> bool:
    conditions = node["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "Unknown" for c in conditions)


def is_tainted(node: Object) -> bool:
    return any(taint["key"] == UNREACHABLE for taint in node.get("spec", {}).get("taints", ()))


def _set_not_ready(pod: Object) -> None:
    for condition in pod["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition |= {"status": "False", "reason": "NodeNotReady"}
