"""Keeps the charts of past releases, from which tests upgrade: `tests/helm/releases/charts/`.

    tandem-0.1.0.tgz           the chart as it was released
    tandem-0.1.0.values.yaml   its scenarios (helm/ci), by name: what operators of that release have

They are committed, because tests run in clones without tags or history. A release adds its own; the
oldest may go when UPGRADE.md no longer promises a step from it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from release import ROOT

FOLDER = ROOT / "tests" / "helm" / "releases" / "charts"
_SUFFIX = "-values.yaml"


def keep(chart: Path, scenarios: Path = ROOT / "helm" / "ci", folder: Path = FOLDER) -> Path:
    """Copies a packaged chart and the values of its scenarios; returns the copy."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        path.name.removesuffix(_SUFFIX): yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted(scenarios.glob(f"*{_SUFFIX}"))
    }
    text = yaml.safe_dump(values, sort_keys=True, width=100)
    (folder / f"{chart.stem}.values.yaml").write_text(text, encoding="utf-8")
    return Path(shutil.copy(chart, folder / chart.name))
