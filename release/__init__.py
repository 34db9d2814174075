"""The tools that make a release: locks of dependencies, artifacts, signatures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("x86_64", "aarch64")
"""The machines that images are made for, as Python names them."""
IMAGES = ("router", "engine")
"""Stages of the Dockerfile, each with a lock `requirements/image-NAME.lock`."""


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    found: dict[str, Any] = pyproject()["project"]
    return found
