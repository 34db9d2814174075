"""The chart's scenarios (`helm/ci/*-values.yaml`), rendered once for each Kubernetes version."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from tests.helm.helm_engine import CHART, HelmSdk, Manifest, Rendered, load_values

SCENARIOS = {
    path.name.removesuffix("-values.yaml"): path
    for path in sorted((CHART / "ci").glob("*-values.yaml"))
}
FIRST_KUBE_VERSION = {
    "image-volume": "1.34", "devices": "1.34", "fabric": "1.30", "gang": "1.37",
}  # fmt: skip
"""The version of scenarios that need a newer Kubernetes than the chart."""


@cache
def values_of(name: str) -> dict[str, Any]:
    return load_values(Path(SCENARIOS[name]))


@cache
def rendered(name: str, kube_version: str = "") -> Rendered:
    version = f"{kube_version}.0" if kube_version else version_of(name)
    return HelmSdk.shared().render(values_of(name), kube_version=version)


def version_of(name: str) -> str:
    """Returns 1.34.0, or the first Kubernetes that has all of the scenario."""
    return "1.34.0" if supports(name, "1.34") else f"{FIRST_KUBE_VERSION[name]}.0"


def supports(name: str, kube_version: str) -> bool:
    def key(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    return key(kube_version) >= key(FIRST_KUBE_VERSION.get(name, "1.28"))


WORKLOADS = ("Deployment", "LeaderWorkerSet")
_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


def templates_of(manifest: Manifest) -> dict[str, Manifest]:
    """Maps part to pod: one, or the leader's and the worker's of a group. Nothing for other
    kinds.
    """
    if manifest["kind"] == "Pod":
        return {"": manifest}
    if manifest["kind"] in ("Deployment", "Job"):
        return {"": manifest["spec"]["template"]}
    if manifest["kind"] == "DisaggregatedSet":
        return {
            f"{role['metadata']['name']}-{part}": pod
            for role in roles_of(manifest)
            for part, pod in templates_of(role).items()
        }
    if manifest["kind"] != "LeaderWorkerSet":
        return {}
    group = manifest["spec"]["leaderWorkerTemplate"]
    if group["size"] == 1:
        return {"": group["workerTemplate"]}
    found = {}
    for part, index in (("leader", "0"), ("worker", "1")):
        # The controller adds the label; Services and budgets rely on it.
        found[part] = deepcopy(group[f"{part}Template"])
        found[part]["metadata"]["labels"][_WORKER_INDEX] = index
    return found


def roles_of(manifest: Manifest) -> list[Manifest]:
    """Returns what the operator of a DisaggregatedSet makes of it."""
    name = manifest["metadata"]["name"]
    return [
        {
            "kind": "LeaderWorkerSet",
            "metadata": {**role["metadata"], "name": f"{name}-{role['name']}"},
            "spec": role["spec"],
        }
        for role in manifest["spec"]["roles"]
    ]


def pods(found: Rendered) -> dict[str, Manifest]:
    """Maps kind/name/part to pod, for everything that runs pods."""
    return {
        f"{manifest['kind']}/{manifest['metadata']['name']}/{part}": pod
        for manifest in found.objects
        for part, pod in templates_of(manifest).items()
    }


def reproducible(found: Rendered) -> list[Manifest]:
    """Returns the objects; of secrets, which are drawn anew each time, the keys alone."""
    secrets = [dict(o, data=sorted(o["data"])) for o in found.objects if o["kind"] == "Secret"]
    return [o for o in found.objects if o["kind"] != "Secret"] + secrets


def workloads(found: Rendered) -> list[Manifest]:
    roles = [role for one in found.all("DisaggregatedSet") for role in roles_of(one)]
    return [*(manifest for kind in WORKLOADS for manifest in found.all(kind)), *roles]


def workload(found: Rendered, component: str) -> Manifest:
    """Returns a component's workload; of a tier that several models have, the first one's."""
    all_of_them = workloads(found)
    labels = [one["metadata"]["labels"]["app.kubernetes.io/component"] for one in all_of_them]
    of_models = [label for label in labels if label.endswith(f"-{component}")]
    name = component if component in labels else of_models[0]
    (manifest,) = [one for one, label in zip(all_of_them, labels, strict=True) if label == name]
    return manifest


def serving_pod(found: Rendered, component: str) -> Manifest:
    """Returns the pod that answers: of a group, the leader."""
    templates = templates_of(workload(found, component))
    return templates.get("leader", templates.get("", {}))


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Values with others on top, as Helm joins several files."""
    joined = deepcopy(dict(base))
    for key, value in over.items():
        old = joined.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        joined[key] = overlay(old, value) if both else value
    return joined
