"""The chart as a dependency of a chart of the user's own, as GitOps repositories have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.helm_engine import CHART, HelmCli, HelmError, Manifest
from tests.helm.scenarios import values_of

PARENT = {
    "apiVersion": "v2",
    "name": "platform",
    "version": "1.0.0",
    "dependencies": [{"name": "tandem", "version": "*", "condition": "tandem.enabled"}],
}


def objects(chart: Path, values: dict[str, Any], folder: Path) -> dict[str, Manifest]:
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    text = HelmCli().run("template", "tandem", chart, "--kube-version", "1.34.0", "-f", file)
    found = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in found if o["kind"] != "Secret"}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    chart = tmp_path / "platform"
    (chart / "charts").mkdir(parents=True)
    (chart / "charts" / "tandem").symlink_to(CHART)
    (chart / "Chart.yaml").write_text(yaml.safe_dump(PARENT))
    return chart


@pytest.mark.parametrize("name", ["production", "roles"])
def test_it_makes_the_same_objects(name: str, parent: Path, tmp_path: Path) -> None:
    values = dict(values_of(name))
    shared = {"storageClass": "the parent's own", **values.pop("global", {})}
    given = {"tandem": {"enabled": True, **values}, "global": shared}
    alone = {**values, "global": shared}
    assert objects(parent, given, tmp_path) == objects(CHART, alone, tmp_path)


def test_its_condition_leaves_it_out(parent: Path, tmp_path: Path) -> None:
    assert objects(parent, {"tandem": {"enabled": False}}, tmp_path) == {}
    with pytest.raises(HelmError, match="only a parent chart reads it"):
        objects(CHART, {"enabled": False, **values_of("default")}, tmp_path)
