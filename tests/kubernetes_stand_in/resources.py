"""The kinds of object that the stand-in serves: Kubernetes' own, and those of operators that the
chart integrates with.

Names and scopes are those of Kubernetes 1.37. A kind that is not listed is answered with 404, as a
cluster without that operator does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object, as JSON."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One row of the discovery document. `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def is_builtin(self) -> bool:
        """Returns whether the kind is built in: those take strategic merge patches; custom ones do
        not.
        """
        return self.group in _BUILTIN_GROUPS


@dataclass(frozen=True, slots=True)
class Target:
    """Holds what a URL names. `name` is empty for a collection."""

    resource: Resource
    namespace: str
    name: str
    subresource: str


_BUILTIN_GROUPS = (
    "", "apps", "batch", "policy", "autoscaling", "networking.k8s.io", "discovery.k8s.io",
    "rbac.authorization.k8s.io", "coordination.k8s.io", "scheduling.k8s.io", "storage.k8s.io",
)  # fmt: skip

# api version: kind/plural, with "!" for cluster scope, and subresources after a colon
_TABLE: dict[str, tuple[str, ...]] = {
    "v1": (
        "Pod/pods:status,eviction",
        "Service/services:status",
        "ConfigMap/configmaps",
        "Secret/secrets",
        "ServiceAccount/serviceaccounts",
        "Namespace/!namespaces:status",
        "PersistentVolumeClaim/persistentvolumeclaims:status",
        "Node/!nodes:status",
        "Endpoints/endpoints",
        "Event/events",
    ),
    "apps/v1": (
        "Deployment/deployments:status,scale",
        "StatefulSet/statefulsets:status,scale",
        "ReplicaSet/replicasets:status,scale",
        "DaemonSet/daemonsets:status",
        "ControllerRevision/controllerrevisions",
    ),
    "batch/v1": ("Job/jobs:status", "CronJob/cronjobs:status"),
    "networking.k8s.io/v1": (
        "NetworkPolicy/networkpolicies",
        "Ingress/ingresses:status",
        "IngressClass/!ingressclasses",
    ),
    "policy/v1": ("PodDisruptionBudget/poddisruptionbudgets:status",),
    "autoscaling/v2": ("HorizontalPodAutoscaler/horizontalpodautoscalers:status",),
    "rbac.authorization.k8s.io/v1": (
        "Role/roles",
        "RoleBinding/rolebindings",
        "ClusterRole/!clusterroles",
        "ClusterRoleBinding/!clusterrolebindings",
    ),
    "discovery.k8s.io/v1": ("EndpointSlice/endpointslices",),
    "coordination.k8s.io/v1": ("Lease/leases",),
    "scheduling.k8s.io/v1": ("PriorityClass/!priorityclasses",),
    "scheduling.k8s.io/v1beta1": ("PodGroup/podgroups:status",),
    "storage.k8s.io/v1": ("StorageClass/!storageclasses",),
    "apiextensions.k8s.io/v1": ("CustomResourceDefinition/!customresourcedefinitions:status",),
    "monitoring.coreos.com/v1": (
        "PodMonitor/podmonitors",
        "ServiceMonitor/servicemonitors",
        "PrometheusRule/prometheusrules",
    ),
    "keda.sh/v1alpha1": ("ScaledObject/scaledobjects:status",),
    "cert-manager.io/v1": ("Certificate/certificates:status", "Issuer/issuers:status"),
    "gateway.networking.k8s.io/v1": ("HTTPRoute/httproutes:status",),
    "inference.networking.k8s.io/v1": ("InferencePool/inferencepools:status",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet/leaderworkersets:status,scale",),
    "disaggregatedset.x-k8s.io/v1": (
        "DisaggregatedSet/disaggregatedsets:status",
        "DisaggregatedSetRoleScaler/disaggregatedsetrolescalers:status,scale",
    ),
    "scheduling.volcano.sh/v1beta1": ("PodGroup/podgroups:status",),
    "resource.k8s.io/v1": ("ResourceClaimTemplate/resourceclaimtemplates",),
    "ray.io/v1": ("RayCluster/rayclusters:status",),
}


def _read_table() -> Iterator[Resource]:
    for api_version, rows in _TABLE.items():
        group, _, version = api_version.rpartition("/")
        for row in rows:
            names, _, subresources = row.partition(":")
            kind, _, plural = names.partition("/")
            yield Resource(
                group=group,
                version=version,
                plural=plural.removeprefix("!"),
                kind=kind,
                namespaced=not plural.startswith("!"),
                subresources=tuple(filter(None, subresources.split(","))),
            )


RESOURCES = tuple(_read_table())
_BY_PATH = {(r.api_version, r.plural): r for r in RESOURCES}
_BY_TYPE = {(r.api_version, r.kind): r for r in RESOURCES}
_BY_KIND = {r.kind: r for r in RESOURCES}


def resource_of(kind: str) -> Resource:
    """Finds the resource of a kind, as `resource_of("Pod")`; of two groups' kinds of one name the
    later in the table.
    """
    return _BY_KIND[kind]


def resource_of_object(obj: Object) -> Resource:
    """Finds the resource of an object, by its version of the API if it has one."""
    return _BY_TYPE.get((obj.get("apiVersion", ""), obj["kind"])) or resource_of(obj["kind"])


def find_resource(api_version: str, plural: str) -> Resource | None:
    return _BY_PATH.get((api_version, plural))


def api_versions() -> tuple[str, ...]:
    return tuple(_TABLE)


def matches_labels(obj: Object, selector: dict[str, Any] | None) -> bool:
    """Returns whether a `LabelSelector` (matchLabels, matchExpressions) chooses `obj`.

    An empty selector chooses everything, None nothing, as in Kubernetes.
    """
    if selector is None:
        return False
    labels = obj["metadata"].get("labels") or {}
    if any(labels.get(k) != v for k, v in selector.get("matchLabels", {}).items()):
        return False
    return all(_matches(labels, term) for term in selector.get("matchExpressions", ()))


def _matches(labels: dict[str, str], term: dict[str, Any]) -> bool:
    value = labels.get(term["key"])
    match term["operator"]:
        case "In":
            return value in term["values"]
        case "NotIn":
            return value not in term["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"unknown operator {term['operator']!r} in a label selector")


def parse_selector(text: str) -> dict[str, Any]:
    """Reads the `labelSelector` of a query: `a=b,c!=d,e in (f,g),!h,i`."""
    terms = []
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", text):
        term = term.strip()
        if found := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", term):
            operator = "In" if found[2] == "in" else "NotIn"
            values = [value.strip() for value in found[3].split(",")]
            terms.append({"key": found[1], "operator": operator, "values": values})
        elif found := re.fullmatch(r"([^!=\s]+)\s*(!=|==?)\s*(\S*)", term):
            operator = "NotIn" if found[2] == "!=" else "In"
            terms.append({"key": found[1], "operator": operator, "values": [found[3]]})
        elif term.startswith("!"):
            terms.append({"key": term[1:], "operator": "DoesNotExist"})
        else:
            terms.append({"key": term, "operator": "Exists"})
    return {"matchExpressions": terms}
