"""The scale subresource: replicas of a workload, as autoscalers and `kubectl scale` see them."""

from __future__ import annotations

from tests.kubernetes_stand_in.resources import Object


def read(obj: Object) -> Object:
    meta, selector = obj["metadata"], obj["spec"].get("selector", {}).get("matchLabels", {})
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: meta[name] for name in kept},
        "spec": {"replicas": obj["spec"].get("replicas", 1)},
        "status": {
            "replicas": obj.get("status", {}).get("replicas", 0),
            "selector": ",".join(f"{k}={v}" for k, v in selector.items()),
        },
    }


def write(obj: Object, scale: Object) -> None:
    obj["spec"]["replicas"] = int(scale.get("spec", {}).get("replicas", 0))
