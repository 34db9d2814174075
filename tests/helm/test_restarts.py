"""Tests what an upgrade restarts: only pods whose own settings changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helm.helm_engine import CHART, HelmSdk, Manifest, Rendered
from tests.helm.scenarios import (
    FIRST_KUBE_VERSION,
    SCENARIOS,
    overlay,
    rendered,
    reproducible,
    templates_of,
    values_of,
    version_of,
    workloads,
)

BASE = values_of("default")


def templates(found: Rendered) -> dict[str, Manifest]:
    """Maps a component to its pod templates: a workload restarts its pods when these change."""
    return {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: templates_of(one)
        for one in workloads(found)
    }


def changed(over: dict[str, Any], base: dict[str, Any] = BASE) -> set[str]:
    """Components that an upgrade from `base` to `base` with `over` restarts."""
    before = templates(rendered("default") if base is BASE else HelmSdk.shared().render(base))
    after = templates(HelmSdk.shared().render(overlay(base, over), upgrade=True))
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_scaling_a_tier_restarts_nothing(tier: str) -> None:
    assert changed({tier: {"replicas": 7}}) == set()
    before = rendered("default")
    after = HelmSdk.shared().render(overlay(BASE, {tier: {"replicas": 7}}))
    assert after.one("Deployment", tier)["spec"]["replicas"] == 7
    # Beside the count, only what follows from there being several pods.
    old = reproducible(before)
    differ = [o for o in reproducible(after) if o not in old]
    assert {
        (o["kind"], o["metadata"]["labels"]["app.kubernetes.io/component"]) for o in differ
    } == {
        ("Deployment", tier),
        ("PodDisruptionBudget", tier),
    }


@pytest.mark.parametrize(
    "over",
    [
        {"prefill": {"autoscaling": {"kind": "hpa"}}},
        {"prefill": {"pdb": {"enabled": False}}},
        {"decode": {"strategy": {"maxSurge": 1}}},
        {"monitoring": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}},
        {"networkPolicy": {"enabled": False}},
        {"router": {"service": {"type": "NodePort"}, "ingress": {"enabled": True}}},
        {"commonLabels": {"team": "x"}, "commonAnnotations": {"note": "y"}},
        {"tests": {"enabled": False}},
        {"tls": {"generated": {"days": 30}, "certManager": {"duration": "4000h"}}},
    ],
)
def test_what_is_no_setting_of_a_pod_restarts_nothing(over: dict[str, Any]) -> None:
    assert changed(over) == set()


def test_a_setting_of_one_component_restarts_that_one_alone() -> None:
    assert changed({"prefill": {"settings": {"maxNumSeqs": 8}}}) == {"prefill"}
    assert changed({"decode": {"resources": {"requests": {"cpu": "8"}}}}) == {"decode"}
    assert changed({"router": {"settings": {"logLevel": "debug"}}}) == {"router"}
    assert changed({"prefill": {"drain": {"drainSeconds": 60}}}) == {"prefill"}


def test_the_model_restarts_both_tiers_and_not_the_router() -> None:
    assert changed({"model": {"maxModelLen": 4096}}) == {"prefill", "decode"}


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the chart with another version."""
    newer = tmp_path_factory.mktemp("newer") / "tandem"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text(encoding="utf-8")
    bumped = re.sub(r"(?m)ersion: \d+\.\d+\.\d+$", "ersion: 9.9.9", text)
    assert bumped.count("9.9.9") == 2
    (newer / "Chart.yaml").write_text(bumped, encoding="utf-8")
    return newer


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_new_chart_version_with_the_same_images_restarts_nothing(name: str, newer: Path) -> None:
    values = overlay(values_of(name), {"image": {"router": {"tag": "1"}, "engine": {"tag": "1"}}})
    version = version_of(name)
    before = HelmSdk.shared().render(values, kube_version=version)
    after = HelmSdk.shared().render(values, chart=newer, upgrade=True, kube_version=version)
    assert templates(before) == templates(after)
    for old, new in zip(before.all("Deployment"), after.all("Deployment"), strict=True):
        assert old["spec"]["selector"] == new["spec"]["selector"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_newer_kubernetes_or_operator_restarts_nothing(name: str) -> None:
    """The templates of pods must not depend on what the cluster can do."""
    old = f"{FIRST_KUBE_VERSION.get(name, '1.28')}.0"
    before = HelmSdk.shared().render(values_of(name), kube_version=old, api_versions=())
    assert templates(before) == templates(rendered(name, "1.37"))
