"""Autoscalers of the stand-in: Kubernetes' own, and KEDA's on top of it.

    ScaledObject ──KedaOperator──▶ HorizontalPodAutoscaler ──AutoscalerController──▶ /scale
         │ queries                        ▲ values                                    of its target
         ▼                                │
    Query (a Prometheus) ─────────────────┘

Both act when a test says that time has passed (`sync`), which is 15 seconds in a cluster: an hour
takes a moment. What the algorithm wants is `tests.kubernetes_stand_in.hpa`.

KEDA: a query that fails, or finds nothing, is an error. After `failureThreshold` of them in a row
the replicas of `fallback` are wanted, or as many as there are if they are more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.kubernetes_stand_in.hpa import (
    AutoscalerSpec,
    AverageValue,
    HorizontalPodAutoscaler,
    ScalingPolicy,
    ScalingRules,
)
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_terminating, owner_reference
from tests.kubernetes_stand_in.resources import Object, Target, resource_of
from tests.kubernetes_stand_in.writes import Writer

PodMetric = Callable[[str, Object], float | None]
"""Sum of a metric over the pods of a workload; None: it cannot be read."""
Query = Callable[[str], float | None]
"""Answers PromQL; None: no series."""

_MANAGER = "kube-controller-manager"


class AutoscalerController:
    """Scales what HorizontalPodAutoscalers name. `externals`: values of KEDA's, by their name."""

    def __init__(
        self, store: ObjectStore, pod_metric: PodMetric, keda: KedaOperator | None = None
    ) -> None:
        self._store = store
        self._pod_metric = pod_metric
        self._keda = keda
        self._scalers: dict[str, HorizontalPodAutoscaler] = {}

    def sync(self, now_s: float) -> None:
        if self._keda is not None:
            self._keda.sync()
        for hpa in self._store.list_kind("HorizontalPodAutoscaler"):
            target = self._target(hpa)
            if target is not None:
                self._scale(hpa, target, now_s)

    def _target(self, hpa: Object) -> Object | None:
        ref = hpa["spec"]["scaleTargetRef"]
        return self._store.find(ref["kind"], hpa["metadata"]["namespace"], ref["name"])

    def _scale(self, hpa: Object, target: Object, now_s: float) -> None:
        spec = _spec(hpa["spec"])
        scaler = self._scalers.setdefault(hpa["metadata"]["uid"], HorizontalPodAutoscaler(spec))
        scaler.spec = spec
        current = target["spec"].get("replicas", 1)
        metrics = [self._read(hpa, metric, target) for metric in hpa["spec"].get("metrics", ())]
        wanted = scaler.desire(now_s, current, metrics)
        if wanted != current:
            meta = target["metadata"]
            at = Target(resource_of(target["kind"]), meta["namespace"], meta["name"], "scale")
            patch = {"spec": {"replicas": wanted}}
            Writer(self._store).patch(at, "merge", patch, _MANAGER, dry_run=False)

    def _read(self, hpa: Object, metric: dict[str, Any], target: Object) -> AverageValue:
        kind = metric["type"].lower()
        source = metric[kind]
        if kind == "external":
            assert self._keda is not None, "an external metric without KEDA"
            total = self._keda.value(hpa, target)
        else:
            total = self._pod_metric(source["metric"]["name"], target)
        return AverageValue(total, quantity(source["target"]["averageValue"]))


class KedaOperator:
    """Makes autoscalers of ScaledObjects, and answers for their metrics."""

    def __init__(self, store: ObjectStore, query: Query) -> None:
        self._store = store
        self._query = query
        self._failures: dict[str, int] = {}

    def sync(self) -> None:
        for scaled in self._store.list_kind("ScaledObject"):
            if not is_terminating(scaled):
                self._apply(scaled)

    def _apply(self, scaled: Object) -> None:
        meta, spec = scaled["metadata"], scaled["spec"]
        (trigger,) = spec["triggers"]
        name = f"keda-hpa-{meta['name']}"
        wanted = {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicas": spec.get("minReplicaCount", 1),
            "maxReplicas": spec.get("maxReplicaCount", 100),
            **spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}),
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": "s0-prometheus"},
                        "target": {
                            "type": "AverageValue",
                            "averageValue": trigger["metadata"]["threshold"],
                        },
                    },
                }
            ],
        }
        found = self._store.find("HorizontalPodAutoscaler", meta["namespace"], name)
        if found is None:
            self._store.create(
                {
                    "apiVersion": "autoscaling/v2",
                    "kind": "HorizontalPodAutoscaler",
                    "metadata": {
                        "name": name,
                        "namespace": meta["namespace"],
                        "ownerReferences": [owner_reference(scaled)],
                    },
                    "spec": wanted,
                }
            )
        elif found["spec"] != wanted:
            self._store.update({**found, "spec": wanted})

    def value(self, hpa: Object, target: Object) -> float | None:
        """Returns the metric of KEDA's autoscaler: of the query, or what leads to the fallback."""
        name = hpa["metadata"]["name"].removeprefix("keda-hpa-")
        scaled = self._store.find("ScaledObject", hpa["metadata"]["namespace"], name)
        if scaled is None:
            return None
        (trigger,) = scaled["spec"]["triggers"]
        found = self._query(trigger["metadata"]["query"])
        if found is None and trigger["metadata"].get("ignoreNullValues", "true") == "true":
            found = 0.0
        if found is not None:
            self._failures[name] = 0
            return found
        self._failures[name] = self._failures.get(name, 0) + 1
        fallback = scaled["spec"].get("fallback")
        if fallback is None or self._failures[name] <= fallback["failureThreshold"]:
            return None
        replicas = fallback["replicas"]
        if fallback.get("behavior") == "currentReplicasIfHigher":
            replicas = max(replicas, target["spec"].get("replicas", 1))
        return float(replicas * quantity(trigger["metadata"]["threshold"]))


def _spec(spec: dict[str, Any]) -> AutoscalerSpec:
    defaults = AutoscalerSpec(min_replicas=1, max_replicas=1)
    behavior = spec.get("behavior", {})
    return AutoscalerSpec(
        min_replicas=spec.get("minReplicas", 1),
        max_replicas=spec["maxReplicas"],
        scale_up=_rules(behavior.get("scaleUp"), defaults.scale_up),
        scale_down=_rules(behavior.get("scaleDown"), defaults.scale_down),
    )


def _rules(rules: dict[str, Any] | None, default: ScalingRules) -> ScalingRules:
    if rules is None:
        return default
    policies = [
        ScalingPolicy(one["type"], one["value"], one["periodSeconds"])
        for one in rules.get("policies", ())
    ]
    return ScalingRules(
        stabilization_s=rules.get("stabilizationWindowSeconds", default.stabilization_s),
        policies=tuple(policies) or default.policies,
    )


def quantity(text: str) -> float:
    """Reads a quantity without a binary suffix: `12000`, `800m`."""
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
