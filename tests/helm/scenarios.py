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
FIRST_KUBE_VERSION = {"image-volume": "1.34"}
"""Of scenarios that need a newer Kubernetes than the chart."""
POD_KINDS = {"Deployment": ("spec", "template"), "Pod": ()}


@cache
def values_of(name: str) -> dict[str, Any]:
    return load_values(Path(SCENARIOS[name]))


@cache
def rendered(name: str, kube_version: str = "1.34") -> Rendered:
    return HelmSdk.shared().render(values_of(name), kube_version=f"{kube_version}.0")


def supports(name: str, kube_version: str) -> bool:
    def key(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    return key(kube_version) >= key(FIRST_KUBE_VERSION.get(name, "1.28"))


def pod_of(manifest: Manifest) -> Manifest:
    """The pod, or the template of a workload's pods."""
    found = manifest
    for key in POD_KINDS[manifest["kind"]]:
        found = found[key]
    return found


def pods(manifests: Rendered) -> dict[str, Manifest]:
    """Kind/name to pod, of everything that runs pods."""
    return {
        f"{manifest['kind']}/{manifest['metadata']['name']}": pod_of(manifest)
        for manifest in manifests.objects
        if manifest["kind"] in POD_KINDS
    }


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Values with others on top, as Helm joins several files."""
    joined = deepcopy(dict(base))
    for key, value in over.items():
        old = joined.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        joined[key] = overlay(old, value) if both else value
    return joined
