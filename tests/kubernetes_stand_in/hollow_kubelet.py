"""A kubelet that runs nothing: every pod that has a node is ready at once, and gone at once.

For tests of what Helm and the controllers do. Pods that are to end by themselves (of Jobs and Helm
tests) have succeeded. Pods whose image has the tag `broken` never become ready.
"""

from __future__ import annotations

from typing import Any

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_terminating, phase
from tests.kubernetes_stand_in.pod_template import set_status
from tests.kubernetes_stand_in.resources import Object


def run_hollow_pods(store: ObjectStore) -> None:
    """Runs as another controller for `ControllerManager`."""
    for pod in store.list_kind("Pod"):
        if is_terminating(pod):
            store.delete_object(pod, grace_s=0)
        elif pod["spec"].get("nodeName") and phase(pod) == "Pending" and not _is_broken(pod):
            set_status(store, pod, _status(store, pod))


def _is_broken(pod: Object) -> bool:
    return any(c["image"].endswith(":broken") for c in pod["spec"]["containers"])


def _status(store: ObjectStore, pod: Object) -> dict[str, Any]:
    ends = pod["spec"].get("restartPolicy", "Always") != "Always"
    return {
        "phase": "Succeeded" if ends else "Running",
        "podIP": store.network.next_pod(),
        "conditions": [
            {"type": type_, "status": "False" if ends else "True"}
            for type_ in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
    }
