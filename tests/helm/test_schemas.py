"""Every scenario, on every Kubernetes version, is what Kubernetes and the operators expect; and
both Helm engines make the same of it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.helm.helm_engine import ROOT, HelmCli, HelmMissing, HelmSdk, Manifest, Rendered
from tests.helm.kube_schemas import KUBE_VERSIONS, errors
from tests.helm.scenarios import SCENARIOS, rendered, reproducible, supports, values_of


def test_engines_are_the_pinned_ones() -> None:
    assert (HelmSdk.shared().version(), HelmCli().version()) == ("v4.2.3", "v3.6.2")


def test_helm_that_is_missing_fails_the_tests_that_need_it_and_no_collection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(HelmMissing, match="make helm-tools"):
        HelmCli()
    files = [
        file for file in (ROOT / "tests").rglob("test_*.py") if "HelmCli" in file.read_text("utf-8")
    ]
    assert len(files) > 5
    for file in files:
        runpy.run_path(str(file))


CASES = [
    (name, version) for name in SCENARIOS for version in KUBE_VERSIONS if supports(name, version)
]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_objects_fit_their_strict_schemas(name: str, version: str) -> None:
    manifests = rendered(name, version).objects
    assert manifests
    assert not [error for manifest in manifests for error in errors(manifest, version)]


def in_order(found: Rendered) -> list[Manifest]:
    """Sorts the objects: the engines sort kinds that are not Kubernetes' own differently."""
    return sorted(reproducible(found), key=lambda o: (o["kind"], o["metadata"]["name"]))


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_engines_render_the_same_objects(name: str) -> None:
    version = next(version for version in KUBE_VERSIONS if supports(name, version))
    old = HelmCli().render(values_of(name), kube_version=f"{version}.0")
    assert in_order(old) == in_order(rendered(name, version))


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_engines_find_nothing_to_lint(name: str) -> None:
    assert HelmSdk.shared().lint(values_of(name)) == []
    # The old engine lints against the Kubernetes it was built for, which has no image volumes.
    if supports(name, "1.28"):
        assert HelmCli().lint(values_of(name)) == []


def test_a_wrong_field_and_a_null_would_be_found() -> None:
    """The check itself: all errors are told, not only the first."""
    manifest = rendered("default").one("Deployment", "router")
    broken = {**manifest, "spec": {**manifest["spec"], "replica": 1, "paused": None}}
    del broken["spec"]["selector"]
    found = "\n".join(errors(broken, "1.34"))
    assert "replica" in found and "selector" in found and ".spec.paused: is null" in found
