"""Upgrades from every kept release to the tree: values, objects and pods of whoever runs it.

`tests/helm/releases/charts/` has the charts, each with the values of its scenarios. Here no process
runs; `test_real_pods.py` upgrades under load, from the newest of them or the one that
`UPGRADE_FROM` names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from release import project
from release.kept_chart import FOLDER
from tests.helm.helm_engine import HelmSdk, Manifest, Rendered
from tests.helm.releases.helm_release import Release
from tests.helm.scenarios import FIRST_KUBE_VERSION
from tests.kubernetes_stand_in.cluster import Cluster
from tests.kubernetes_stand_in.pod_state import is_ready

KEPT = sorted(FOLDER.glob("*.tgz"), key=lambda path: Version(path.stem.removeprefix("tandem-")))
NEWEST = KEPT[-1]
PROCESSES_FROM = FOLDER / os.environ.get("UPGRADE_FROM", NEWEST.name)
"""The chart whose pods run as processes: `make test-upgrades` names each."""
VALUES: dict[str, Any] = {
    "model": {"name": "example/model"},
    "router": {"replicas": 2},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3},
}
COMPONENTS = ("router", "prefill", "decode")


def scenarios(chart: Path) -> dict[str, dict[str, Any]]:
    """Returns the values that came with a kept chart, by name."""
    text = chart.with_name(f"{chart.stem}.values.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


CASES = [(chart, name) for chart in KEPT for name in scenarios(chart)]


def keyed(found: Rendered) -> dict[tuple[str, str], Manifest]:
    """Maps (kind, name) to object, those that Helm keeps: tests' pods come and go."""
    return {
        (o["kind"], o["metadata"]["name"]): o
        for o in found.objects
        if "helm.sh/hook" not in o["metadata"].get("annotations", {})
    }


def fixed_parts(manifest: Manifest) -> dict[str, Any]:
    """Returns what Kubernetes lets nobody change in place."""
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "Deployment":
            return {"selector": spec["selector"]}
        case "Service":
            return {"clusterIP": spec.get("clusterIP"), "families": spec.get("ipFamilies")}
        case "PersistentVolumeClaim":
            return {key: spec.get(key) for key in ("accessModes", "storageClassName", "volumeName")}
        case "RoleBinding":
            return {"roleRef": manifest["roleRef"]}
    return {}


def test_the_newest_kept_chart_is_of_an_older_release_than_the_tree() -> None:
    """A release that was kept raises the tree's version: nobody upgrades to what they run."""
    assert Version(NEWEST.stem.removeprefix("tandem-")) < Version(project()["version"])


@pytest.mark.parametrize(("chart", "name"), CASES, ids=lambda case: getattr(case, "stem", case))
def test_values_of_a_release_render_and_change_nothing_that_cannot_change(
    chart: Path, name: str
) -> None:
    """Nor do objects go that clients, claims or autoscalers know by name."""
    version = f"{FIRST_KUBE_VERSION.get(name, '1.34')}.0"
    values = scenarios(chart)[name]
    old = keyed(HelmSdk.shared().render(values, chart=chart, kube_version=version))
    new = keyed(HelmSdk.shared().render(values, kube_version=version, upgrade=True))
    gone = {key for key in old if key not in new}
    assert not gone, "an upgrade deletes these"
    for key, manifest in old.items():
        assert fixed_parts(new[key]) == fixed_parts(manifest), key
        assert new[key]["apiVersion"] == manifest["apiVersion"], key
        if manifest["kind"] in ("Deployment", "LeaderWorkerSet"):
            assert new[key]["spec"].get("replicas") == manifest["spec"].get("replicas"), key
        if manifest["kind"] == "Service":
            ports = {(p["name"], p["port"]) for p in manifest["spec"]["ports"]}
            assert ports <= {(p["name"], p["port"]) for p in new[key]["spec"]["ports"]}, key


@contextlib.contextmanager
def fewest_ready(cluster: Cluster) -> Iterator[dict[str, int]]:
    """Yields the fewest ready pods of each component since, after whichever write."""
    fewest = {name: len(cluster.pods(name)) for name in COMPONENTS}

    def look() -> None:
        for name in COMPONENTS:
            fewest[name] = min(fewest[name], sum(map(is_ready, cluster.pods(name))))

    with cluster.store.observed_by(look):
        yield fewest


def made_secrets(cluster: Cluster) -> dict[str, Any]:
    """Returns the data of the chart's secrets: Helm keeps releases in others."""
    return {
        secret["metadata"]["name"]: secret["data"]
        for secret in cluster.objects("Secret")
        if not secret["type"].startswith("helm.sh/")
    }


@pytest.mark.parametrize("chart", KEPT, ids=lambda chart: chart.stem)
async def test_an_upgrade_keeps_secrets_and_replicas_and_goes_back(
    cluster: Cluster, release: Release, chart: Path
) -> None:
    """Runs through both Helms. No tier ever lacks more than the one pod that it gives up first."""
    wanted = {name: VALUES[name]["replicas"] for name in COMPONENTS}
    await release.install(VALUES, chart=chart)
    await cluster.wait_ready(**wanted)
    secrets = made_secrets(cluster)
    services = {s["metadata"]["name"]: s["spec"]["clusterIP"] for s in cluster.objects("Service")}
    before = {name: cluster.uids(name) for name in COMPONENTS}
    with fewest_ready(cluster) as fewest:
        await release.upgrade(VALUES)
        await cluster.wait_ready(**wanted)
    assert not any(before[name] & cluster.uids(name) for name in COMPONENTS)
    assert fewest == {"router": 2, "prefill": 1, "decode": 2}
    assert made_secrets(cluster) == secrets and secrets
    now = {s["metadata"]["name"]: s["spec"]["clusterIP"] for s in cluster.objects("Service")}
    assert services.items() <= now.items()
    label = cluster.get("Deployment", "tandem-decode")["metadata"]["labels"]["helm.sh/chart"]
    assert label == f"tandem-{project()['version']}"
    await release.rollback(1)
    await cluster.wait_ready(**wanted)
    label = cluster.get("Deployment", "tandem-decode")["metadata"]["labels"]["helm.sh/chart"]
    assert label == chart.stem
