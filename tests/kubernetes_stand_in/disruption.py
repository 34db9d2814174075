"""Disruption budgets: how many pods may be taken away at this moment."""

from __future__ import annotations

import math

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_ready, is_terminating
from tests.kubernetes_stand_in.pod_template import set_status
from tests.kubernetes_stand_in.resources import Object, matches_labels


def may_evict(store: ObjectStore, pod: Object) -> bool:
    namespace = pod["metadata"]["namespace"]
    budgets = [
        budget
        for budget in store.list_kind("PodDisruptionBudget", namespace)
        if matches_labels(pod, budget["spec"].get("selector"))
    ]
    return all(_allowed(store, budget, pod) > 0 for budget in budgets)


def _allowed(store: ObjectStore, budget: Object, pod: Object) -> int:
    if not is_ready(pod) and budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return 1
    pods = _chosen(store, budget)
    return _num_healthy(pods) - _num_wanted(budget, len(pods))


def _chosen(store: ObjectStore, budget: Object) -> list[Object]:
    pods = store.list_kind("Pod", budget["metadata"]["namespace"])
    selector = budget["spec"].get("selector")
    return [p for p in pods if matches_labels(p, selector) and not is_terminating(p)]


def _num_healthy(pods: list[Object]) -> int:
    return sum(map(is_ready, pods))


def _num_wanted(budget: Object, expected: int) -> int:
    """Returns how many must stay healthy."""
    spec = budget["spec"]
    if "maxUnavailable" in spec:
        return expected - share(spec["maxUnavailable"], expected, round_up=True)
    return share(spec.get("minAvailable", 1), expected, round_up=True)


def share(value: int | str, total: int, *, round_up: bool) -> int:
    """Returns `3` or `"25%"` of `total`."""
    if isinstance(value, int):
        return value
    part = total * int(value.removesuffix("%")) / 100
    return math.ceil(part) if round_up else math.floor(part)


def reconcile_budgets(store: ObjectStore) -> None:
    for budget in store.list_kind("PodDisruptionBudget"):
        pods = _chosen(store, budget)
        healthy = _num_healthy(pods)
        wanted = _num_wanted(budget, len(pods))
        status = {
            "expectedPods": len(pods),
            "currentHealthy": healthy,
            "desiredHealthy": wanted,
            "disruptionsAllowed": max(0, healthy - wanted),
            "observedGeneration": budget["metadata"]["generation"],
        }
        set_status(store, budget, status)
