"""Service → EndpointSlice: at which addresses a service's pods are, and in which condition.

    ready         for new work: the pod is ready and stays
    serving       the pod is ready, whether it stays or not
    terminating   the pod is about to go

Addresses are published as soon as a pod has one.
"""

from __future__ import annotations

from typing import Any

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_over, is_ready, is_terminating, owner_reference
from tests.kubernetes_stand_in.pod_template import set_status
from tests.kubernetes_stand_in.resources import Object, matches_labels


def reconcile_services(store: ObjectStore) -> None:
    for service in store.list_kind("Service"):
        spec = service["spec"]
        if "clusterIP" not in spec and spec.get("type") != "ExternalName":
            store.change(service, lambda current: _set_address(store, current))
        elif spec.get("selector"):
            _reconcile_slice(store, service)


def _set_address(store: ObjectStore, service: Object) -> None:
    taken = {s["spec"].get("clusterIP", "") for s in store.list_kind("Service")}
    service["spec"]["clusterIP"] = store.network.free_service(taken)


def _reconcile_slice(store: ObjectStore, service: Object) -> None:
    meta = service["metadata"]
    pods = [
        pod
        for pod in store.list_kind("Pod", meta["namespace"])
        if matches_labels(pod, {"matchLabels": service["spec"]["selector"]})
        and pod.get("status", {}).get("podIP")
        and not is_over(pod)
    ]
    name = f"{meta['name']}-endpoints"
    wanted: Object = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": {**meta.get("labels", {}), "kubernetes.io/service-name": meta["name"]},
            "ownerReferences": [owner_reference(service)],
        },
        "addressType": service["spec"].get("ipFamilies", ["IPv4"])[0],
        "endpoints": [_endpoint(service, pod) for pod in pods],
        "ports": [_port(port, pods) for port in service["spec"]["ports"]],
    }
    current = store.find("EndpointSlice", meta["namespace"], name)
    if current is None:
        store.create(wanted)
    elif any(current.get(field) != wanted[field] for field in ("endpoints", "ports")):
        wanted["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
        store.update(wanted)


def _endpoint(service: Object, pod: Object) -> dict[str, Any]:
    is_serving = is_ready(pod)
    publishes_all = service["spec"].get("publishNotReadyAddresses", False)
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {
            "ready": publishes_all or (is_serving and not is_terminating(pod)),
            "serving": is_serving,
            "terminating": is_terminating(pod),
        },
        "nodeName": pod["spec"]["nodeName"],
        "targetRef": {
            "kind": "Pod",
            "name": pod["metadata"]["name"],
            "namespace": pod["metadata"]["namespace"],
            "uid": pod["metadata"]["uid"],
        },
    }


def _port(port: dict[str, Any], pods: list[Object]) -> dict[str, Any]:
    target = port.get("targetPort", port["port"])
    number = target if isinstance(target, int) else _named_port(pods, target)
    return {
        "name": port.get("name", ""),
        "port": number or port["port"],
        "protocol": port.get("protocol", "TCP"),
        **({"appProtocol": port["appProtocol"]} if "appProtocol" in port else {}),
    }


def _named_port(pods: list[Object], name: str) -> int | None:
    for pod in pods:
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                if port.get("name") == name:
                    return int(port["containerPort"])
    return None


def bind_claims(store: ObjectStore) -> None:
    """Binds every claim to its volume at once."""
    for claim in store.list_kind("PersistentVolumeClaim"):
        if claim.get("status", {}).get("phase") != "Bound":
            set_status(store, claim, {"phase": "Bound"})
