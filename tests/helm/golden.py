"""Keeps the golden files: `python -m tests.helm.golden` writes what the chart renders now.

A change of a template shows there as what it does to the objects, for whoever reviews it.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import yaml

from tests.helm.scenarios import rendered, reproducible

FOLDER = Path(__file__).parent / "golden"
NAMES = ("cpu", "default", "keda", "models", "production", "roles", "tls-certmanager")


def text_of(name: str) -> str:
    """Returns all objects of a scenario, in a stable order; long texts of files are left out."""
    objects = sorted(
        deepcopy(reproducible(rendered(name))),
        key=lambda o: (o["kind"], o["metadata"]["name"], o["apiVersion"]),
    )
    for manifest in objects:
        if manifest["kind"] == "ConfigMap":
            manifest["data"] = sorted(manifest["data"])
        if manifest["kind"] == "Pod":
            manifest["spec"]["containers"][0]["args"] = ["files/tests/smoke.py"]
    return yaml.safe_dump_all(objects, sort_keys=True, width=100)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        (FOLDER / f"{name}.yaml").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
